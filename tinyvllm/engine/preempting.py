"""Room for running requests: who gives up blocks for whom, and the copies that this takes."""

from __future__ import annotations

from bisect import insort

from tinyvllm.config import RETURN_MARGIN, EngineConfig
from tinyvllm.driver.calls import CudaError
from tinyvllm.engine.events import EventLog
from tinyvllm.engine.preemption import RECOMPUTE, SWAP, Preemption, RateMeter
from tinyvllm.engine.queues import Queues
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.swapper import Swapper
from tinyvllm.util import ceil_div, logger


class Preempting(Queues):
    """The queues, with what makes room in the KV cache for those that run.

    * `running` is in order of urgency. When blocks run out its last, so the least urgent and
      among these the latest arrival, is preempted, whatever the policy: it gives up its blocks.
      Either they are copied to the swap space, and back on its return; or it computes all its
      tokens again later, its output so far included, as if they were its prompt. Nobody is
      preempted for a less urgent request, or for one that waits.
    * Above `preemption_threshold`, as a share of the blocks in use, the full blocks of the next one
      to be preempted are copied out while it runs, so that most of its blocks are free at once. A
      block that a copy under way needs is not free; a request that waits for one has no row in a
      step, and nobody else is preempted.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        max_model_len: int,
        vocab_size: int,
        swapper: Swapper | None = None,
    ) -> None:
        super().__init__(config, blocks, max_model_len, vocab_size, swapper)
        self.num_preemptions = {SWAP: 0, RECOMPUTE: 0}
        self.prefill_rate = RateMeter()  # tokens of prompts; whoever runs the steps adds
        mode, threshold = config.preemption_mode, config.preemption_threshold
        self.preemption = Preemption(self.tables, self.swaps, mode, self.prefill_rate)
        self.preemption_threshold = threshold
        # Blocks in use up to which requests are admitted, and preempted ones return.
        self._admission_limit = round_down(threshold * blocks.num_blocks)
        self._return_limit = round_down((threshold - RETURN_MARGIN) * blocks.num_blocks)
        self.events = EventLog(blocks.num_blocks, self._admission_limit, self._return_limit)
        self._failed: list[Request] = []

    def take_failed(self) -> list[Request]:
        """The requests that have ended since the last call because a copy failed."""
        failed, self._failed = self._failed, []
        return failed

    def wait_for_copy(self) -> None:
        """Waits for the oldest copy under way, if any; the next `schedule` makes use of it."""
        self.swaps.wait()

    def end_copies(self) -> None:
        """Waits for all copies under way: all blocks without users are free then."""
        while self.swaps.busy:
            self.swaps.wait()
            self._end_copies()

    def _copy_ahead(self) -> None:
        """Copy the full blocks of the next one to be preempted out while it runs.

        All steps that write them have been launched, and nobody writes them again.
        """
        victim = self.running[-1] if len(self.running) > 1 else None
        if victim is None or not victim.decoding or victim.num_copies:
            return
        full = victim.num_computed_tokens // self.blocks.block_size
        if full > victim.num_host_blocks and self._choose(victim, full)[0] == SWAP:
            self._copy_out(victim, full)

    def _choose(self, victim: Request, num_blocks: int) -> tuple[str, str]:
        """What to do with a victim, of which the first blocks a table would be copied.

        Where the swap space is full, copies of running requests give way, those of the most urgent
        first: others have become less urgent than they since the copies were made ahead.
        """
        if victim.decoding:
            need = (num_blocks - victim.num_host_blocks) * self.blocks.num_groups
            for request in self.running:
                if self.swaps.num_free >= need:
                    break
                if request is not victim and not request.returning:
                    self.swaps.release(request)
        return self.preemption.choose(victim, num_blocks)

    def _make_room(self, request: Request, step: ScheduledStep) -> bool:
        """Whether a block a group is free for a running request, now or after preemptions.

        The least urgent are preempted, `request` last. False when it was preempted itself, and
        when it has to wait for copies after which there are enough free blocks.
        """
        need = self.blocks.num_groups
        while self.blocks.num_free < need:
            if self.blocks.num_free + self.swaps.num_pending - step.num_awaited >= need:
                step.num_awaited += need
                return False
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, step: ScheduledStep) -> None:
        """Take a running request's blocks and let it wait; it ends if they cannot be copied."""
        num_blocks = ceil_div(victim.num_computed_tokens, self.blocks.block_size)
        mode, reason = self._choose(victim, num_blocks)
        if mode == SWAP:
            if not self._copy_out(victim, num_blocks):
                mode, reason = RECOMPUTE, "the swap space is smaller than planned"
            if victim.finished:
                return
        logger.info("request %r is preempted: %s, %s", victim.request_id, mode, reason)
        self.events.add(mode, victim.request_id, reason)
        self.num_preemptions[mode] += 1
        self._release(victim)
        victim.decoding = victim.returning = False
        victim.num_preemptions += 1
        if mode == SWAP:
            victim.status = RequestStatus.SWAPPED
        else:
            victim.status = RequestStatus.WAITING
            victim.num_computed_tokens = 0
            self.swaps.release(victim)
        insort(self.waiting, victim, key=self.order)
        step.preempted.append(victim)

    def _copy_out(self, request: Request, num_blocks: int) -> bool:
        """Start copying a request's first blocks; False without room. It ends if that fails."""
        try:
            return self.swaps.copy_out(request, num_blocks)
        except CudaError as error:
            self._fail(request, error)
            return True

    def _end_copies(self) -> None:
        for request, error in self.swaps.poll():
            if not request.finished:
                self._fail(request, error)

    def _fail(self, request: Request, error: CudaError) -> None:
        """End a request whose blocks could not be copied."""
        logger.error("request %r ends: %s", request.request_id, error)
        self.events.add("fail", request.request_id, str(error))
        self._finish(request, "error", str(error))
        self._failed.append(request)


def round_down(x: float) -> int:
    """The integer below `x`, or the one that rounding has put `x` next to."""
    return int(x + 1e-9)
