"""What is in each KV block, and where each request stands: one look, for people to see."""

from __future__ import annotations

import time
from itertools import chain
from typing import NamedTuple

import numpy as np

from tinyvllm.engine.events import Event
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.memory.blocks import CACHED, FREE, IN_USE

# What a cell says of its block: FREE, CACHED, IN_USE (by a copy under way alone), SHARED (by
# several requests), or FIRST_LABEL and more: the label of the one request that holds it.
SHARED = 3
FIRST_LABEL = 4
NUM_LABELS = (1 << 16) - FIRST_LABEL
MAX_REQUESTS = 512  # in a view; looking at each costs the engine about a microsecond
assert max(FREE, CACHED, IN_USE) < SHARED


class RequestView(NamedTuple):
    """One sequence. `label` is its cells' value; two have the same only when tens of thousands
    of requests came between them.

    state: "prefill", "decode", "return" (its blocks are being copied back), "swapped", "preempted"
    (to be computed again) or "waiting".
    """

    request_id: str
    label: int
    state: str
    prompt_tokens: int
    output_tokens: int
    blocks: int
    host_blocks: int
    priority: int
    preemptions: int


class EngineView(NamedTuple):
    """`time`: seconds since 1970. The cells of the KV blocks, and of the blocks of the swap space,
    are little-endian 16-bit numbers. Requests: those that run first, then those that wait."""

    time: float
    cells: bytes
    host_cells: bytes
    requests: list[RequestView]
    num_requests_left_out: int  # beyond `MAX_REQUESTS`
    events: list[Event]  # the oldest first


class Viewer:
    """Looks at a scheduler between its steps; nothing is done while nobody asks.

    Most of a look at hundreds of thousands of blocks would go into reading the tables, which are
    lists. A table only grows while its request runs, so what was read of it is kept until the next
    look: that reads what is new, and the rest is arithmetic on arrays.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Entries of tables in any order: block and slot. What was read of the tables in each slot:
        # those of which request (its arrival and preemptions), and their length.
        self._held = np.empty(0, np.int32)
        self._slots = np.empty(0, np.int32)
        self._known: dict[int, tuple[int, int, int]] = {}

    def look(self) -> EngineView:
        """All as it is now."""
        scheduler = self._scheduler
        shown = scheduler.running[:MAX_REQUESTS]
        waiting = scheduler.waiting[: MAX_REQUESTS - len(shown)]
        num_all = len(scheduler.running) + len(scheduler.waiting)
        return EngineView(
            time=time.time(),
            cells=self._cells(),
            host_cells=self._host_cells(),
            requests=[_request_view(request) for request in (*shown, *waiting)],
            num_requests_left_out=num_all - len(shown) - len(waiting),
            events=list(scheduler.events.events),
        )

    def _cells(self) -> bytes:
        scheduler = self._scheduler
        cells = scheduler.blocks.states().astype("<u2")
        self._read_tables(scheduler.running)
        labels = np.zeros(scheduler.max_num_seqs, cells.dtype)
        for request in scheduler.running:
            labels[request.slot] = _label(request)
        cells[self._held] = labels[self._slots]
        cells[np.bincount(self._held, minlength=len(cells)) > 1] = SHARED
        return cells.tobytes()

    def _read_tables(self, running: list[Request]) -> None:
        known, self._known = self._known, {}
        kept = np.zeros(self._scheduler.max_num_seqs, np.bool_)
        blocks: list[int] = []
        slots, counts = [], []
        for request in running:
            slot, length = request.slot, len(request.block_ids[0])
            assert slot is not None
            arrival, preemptions, start = known.get(slot, (-1, 0, 0))
            kept[slot] = arrival == request.arrival and preemptions == request.num_preemptions
            if not kept[slot]:
                start = 0
            if start < length:
                for table in request.block_ids:
                    blocks += table[start:]
                slots.append(slot)
                counts.append((length - start) * len(request.block_ids))
            self._known[slot] = request.arrival, request.num_preemptions, length
        still = kept[self._slots]
        new = np.array(blocks, np.int32), np.repeat(np.array(slots, np.int32), counts)
        self._held = np.concatenate([self._held[still], new[0]])
        self._slots = np.concatenate([self._slots[still], new[1]])

    def _host_cells(self) -> bytes:
        swapper = self._scheduler.swaps.swapper
        if swapper is None:
            return b""
        cells = (swapper.space.in_use() * IN_USE).astype("<u2")
        for request in chain(self._scheduler.running, self._scheduler.waiting):
            for table in request.host_block_ids:
                cells[table] = _label(request)
        return cells.tobytes()


def _label(request: Request) -> int:
    return FIRST_LABEL + request.arrival % NUM_LABELS


def _state(request: Request) -> str:
    if request.status is RequestStatus.RUNNING:
        if request.returning:
            return "return"
        return "decode" if request.decoding else "prefill"
    if request.status is RequestStatus.SWAPPED:
        return "swapped"
    return "preempted" if request.num_preemptions else "waiting"


def _request_view(request: Request) -> RequestView:
    return RequestView(
        request.request_id,
        _label(request),
        _state(request),
        len(request.prompt_token_ids),
        len(request.output_token_ids),
        sum(map(len, request.block_ids)),
        sum(map(len, request.host_block_ids)),
        request.priority,
        request.num_preemptions,
    )
