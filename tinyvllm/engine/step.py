"""What the scheduler hands to the engine: one step's rows and what comes before them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyvllm.engine.block_tables import TableEntry
from tinyvllm.engine.request import Request


@dataclass(slots=True)
class ScheduledRow:
    """Tokens [start, start + num_tokens) of one request, whose row state is at `slot`.

    samples: the row reaches the end of the request's tokens, so its last logits give a new one.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class ScheduledStep:
    """One step's work: the rows, and the edits to the device's state that come before them.

    rows: first `num_decodes` decode rows, of one token each, whose input token is the one that
        the row sampled last (in the device's row state); then prefill rows, whose input tokens
        are `request.tokens(start, start + num_tokens)`. Each request has at most one row.
    longest_context: the largest `start + num_tokens` of a row.
    joins: the rows whose slot changes hands, so its row state must be set up: prefill rows, which
        start after tokens that they share with others, and decode rows of swapped requests that
        are back, whose input token the host knows.
    new_blocks: block-table entries (group, slot, index in the table, block) to write.
    block_copies: blocks (from, to) to copy before the step's own work and after all earlier work.
    preempted: requests that lost their slot and blocks to others.
    num_awaited: blocks for which running requests have no row in this step: they wait for copies.
    filled: (request, its num_preemptions, n): its first n tokens fill blocks once this step is
        done. For `Scheduler.update`.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    longest_context: int = 0
    joins: list[ScheduledRow] = field(default_factory=list)
    new_blocks: list[TableEntry] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_awaited: int = 0
    filled: list[tuple[Request, int, int]] = field(default_factory=list)

    @property
    def decode_rows(self) -> list[ScheduledRow]:
        """The rows that take their input token from the device."""
        return self.rows[: self.num_decodes]

    @property
    def prefill_rows(self) -> list[ScheduledRow]:
        """The rows that take their input tokens from the host."""
        return self.rows[self.num_decodes :]

    @property
    def sampling_rows(self) -> list[ScheduledRow]:
        """The rows that yield a token, in the order in which `Scheduler.update` takes them."""
        if self.num_decodes == len(self.rows):
            return self.rows
        return [row for row in self.rows if row.samples]
