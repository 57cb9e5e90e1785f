"""The requests that wait and those that run, what these hold, and how they come and go."""

from __future__ import annotations

from bisect import insort

from tinyvllm.config import EngineConfig
from tinyvllm.engine.block_tables import BlockTables
from tinyvllm.engine.policy import order_of, urgency
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.engine.swapping import Swaps
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.swapper import Swapper
from tinyvllm.util import InputError


class Queues:
    """Requests from `add` to their end: what of the scheduler's work is not about steps.

    `waiting` is in the order of the policy, `running` in order of urgency. Only those in `running`
    have slots and blocks, and only they and swapped ones have blocks of the swap space.
    `max_model_len` is that of the backend: the one in `config` may be unset.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        max_model_len: int,
        vocab_size: int,
        swapper: Swapper | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.tables = BlockTables(blocks, config.enable_prefix_caching)
        self.swaps = Swaps(blocks, swapper)
        self.order = order_of(config.scheduling_policy)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._prefilling: Request | None = None  # the one that is in the middle of its prompt
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))  # a stack, slot 0 on top
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_finished_tokens = 0  # output of the requests that have ended

    def add(self, request: Request) -> None:
        """Queue a new request. Raises InputError when it can never run, unless `validate` has."""
        if request.prompt_array is None:
            self.validate(request)
        self._check_id(request)
        parent = request.parent
        if parent is not None:
            assert parent.arrival >= 0, f"{parent} must be added before its child {request}"
            assert parent.prompt_token_ids == request.prompt_token_ids
        request.arrival = self._num_arrivals
        request.arrival_step = self._num_steps
        self._num_arrivals += 1
        # The last token is sampled but never stored, hence the 1: even alone in the cache, a
        # sequence cannot grow further.
        limit = min(self.max_model_len, self.blocks.max_tokens + 1)
        if request.params.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + request.params.max_tokens)
        request.max_total_tokens = limit
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=self.order)

    def abort(self, request_id: str) -> Request | None:
        """End a request with reason "abort"; None when it is unknown, or finished before."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort", None)
        return request

    def stop(self, request: Request, stop_reason: str) -> None:
        """End a request with reason "stop" because its text holds the string `stop_reason`.

        It counts more than the length that the request may have reached with the same token.
        """
        if request.finished:
            request.finish_reason, request.stop_reason = "stop", stop_reason
        else:
            self._finish(request, "stop", stop_reason)

    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._requests)

    @property
    def num_generated_tokens(self) -> int:
        """Output tokens of all requests so far, the ended ones included."""
        live = sum(len(request.output_token_ids) for request in self._requests.values())
        return self._num_finished_tokens + live

    def check_integrity(self) -> None:
        """Raise RuntimeError unless blocks, slots and queues agree with the requests."""
        self.tables.check_integrity(self.running, self.swaps.num_references)
        self.swaps.check_integrity([*self.running, *self.waiting])
        slots = sorted([*self._free_slots, *(r.slot for r in self.running if r.slot is not None)])
        if slots != list(range(self.max_num_seqs)):
            raise RuntimeError(f"slots {slots} are not each of 0..{self.max_num_seqs - 1} once")
        arrivals = sorted(r.arrival for r in (*self.running, *self.waiting))
        if arrivals != sorted(r.arrival for r in self._requests.values()):
            raise RuntimeError(f"queues hold arrivals {arrivals}, not all once")
        for queue, key in ((self.running, urgency), (self.waiting, self.order)):
            keys = list(map(key, queue))
            if keys != sorted(keys):
                raise RuntimeError(f"a queue is out of order: {keys}")

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        self.swaps.release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        del self._requests[request.request_id]
        self._num_finished_tokens += len(request.output_token_ids)

    def _release(self, request: Request) -> None:
        """Take a running request's place, blocks and slot back."""
        self.running.remove(request)
        if self._prefilling is request:
            self._prefilling = None
        self.tables.release(request)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None

    def validate(self, request: Request) -> None:
        """Raise InputError, with the numbers, for a request that can never run."""
        self._check_id(request)
        request.validate(self.max_model_len, self.vocab_size)
        blocks, num_prompt = self.blocks, len(request.prompt_token_ids)
        if num_prompt > blocks.max_tokens:
            raise InputError(
                f"request {request.request_id!r}: the prompt of {num_prompt} tokens needs "
                f"{blocks.blocks_for(num_prompt)} KV blocks of {blocks.block_size} tokens; "
                f"the cache has {blocks.num_blocks}"
            )

    def _check_id(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InputError(
                f"request {request.request_id!r}: a request with this id is not finished yet"
            )
