"""Which tokens of which requests the next step computes, and in which blocks: no device here."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from tinyvllm.driver.calls import CudaError
from tinyvllm.engine.policy import urgency
from tinyvllm.engine.preempting import Preempting
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.engine.step import ScheduledRow, ScheduledStep


class Scheduler(Preempting):
    """Continuous batching within a budget of tokens a step.

    Running requests decode first, so that they never starve; what is left of the budget goes to
    prompts, in chunks, of one request at a time but for those that end in the same step. A chunk
    beside decoding requests has no more than `long_prefill_token_threshold` tokens, if that is set.

    * Requests are admitted in the order of the policy, which `waiting` has; only samples of a
      prompt that is computed in the same step are passed over.
    * Admission, with room for all its tokens, may not carry the share of blocks in use above
      `preemption_threshold`; a preempted request stays `RETURN_MARGIN` below that, so that it
      is not preempted again at once. While nothing else runs, both may use all blocks.

    `schedule` needs only counts, never the values of tokens in flight: the next step may be
    scheduled before the tokens of the previous one are passed to `update`. Steps are launched and
    updated in the order in which they were scheduled.
    """

    # The request that found no room, and how many blocks were in use: nothing is looked up again
    # while it is the next and no fewer are.
    _blocked: tuple[Request, int] | None = None

    def schedule(self) -> ScheduledStep | None:
        """The next step; None when nothing can run before tokens in flight are updated.

        Or, if none are in flight, before a copy is done: `wait_for_copy`. All steps scheduled
        before must have been launched, since copies begin after them.
        """
        step = ScheduledStep()
        self._num_steps += 1
        if self.swaps.busy:
            self._end_copies()
        num_used = self.blocks.num_used
        self.events.watch(num_used)
        if num_used > self._admission_limit:
            self._copy_ahead()
        self._decode(step)
        if self._prefilling is not None:
            self._prefill(step, self._prefilling)
        # After a preemption the cache is full, and nobody overtakes an unfinished prompt.
        if not step.preempted and not step.num_awaited and self._prefilling is None:
            self._admit(step)
        return step if step.rows else None

    def launched(self, step: ScheduledStep) -> None:
        """Offers the blocks that `step`, just launched, fills with prompts to the prefix cache.

        Whoever finds them there reads them in a later step, and steps run in the order of their
        launches. So this costs nothing where a device works meanwhile; `update` would do it while
        the device has nothing to do and the caller waits.
        """
        self._keep_filled(step)

    def update(self, step: ScheduledStep, sampled_tokens: Sequence[int]) -> list[Request]:
        """Take the tokens of `step.sampling_rows`, in that order; return the requests that end.

        Their slots are free at once, and so are their blocks, but for those that copies under way
        need. A token of a request that ended since the step was scheduled is dropped. Full blocks
        that the step completed enter the prefix cache.
        """
        self._keep_filled(step)
        ended = []
        for row, token in zip(step.sampling_rows, sampled_tokens, strict=True):
            request = row.request
            if request.status is RequestStatus.FINISHED:
                continue
            output = request.output_token_ids
            output.append(token)
            if token in request.stop_set:
                by_id = token in request.params.stop_token_ids
                reason, stop_reason = "stop", token if by_id else None
            elif len(request.prompt_token_ids) + len(output) == request.max_total_tokens:
                reason, stop_reason = "length", None
            else:
                continue
            if request.slot is not None:
                self.tables.keep(request, row.start + row.num_tokens)
            self._finish(request, reason, stop_reason)
            ended.append(request)
        return ended

    def _keep_filled(self, step: ScheduledStep) -> None:
        """Keeps the full blocks of a launched step as far as the values of their tokens are
        known: those of prompts at once, of sampled tokens from the update of their step on."""
        for request, num_preemptions, num_tokens in step.filled:
            # Otherwise the blocks that the step wrote are not the request's any more.
            if request.slot is None or request.num_preemptions != num_preemptions:
                continue
            if num_tokens <= request.num_known_tokens:
                self.tables.keep(request, num_tokens)

    def _decode(self, step: ScheduledStep) -> None:
        """One token for each running request past its prompt."""
        rows = step.rows
        block_size = self.blocks.block_size
        longest = 0
        # Preemption takes from the end of the list, so it never meets a request that has its row
        # already; the loop ends where the shortened list does.
        for request in self.running:
            if not request.decoding:
                if request.returning:
                    self._rejoin(request, step)
                else:
                    self._claim_block(request, step)
                continue
            if request.num_tokens == request.max_total_tokens:
                continue  # its last token is in flight
            start = request.num_computed_tokens
            # The first test is the cheaper one.
            if start % block_size == 0 and start == len(request.block_ids[0]) * block_size:
                if not self._make_room(request, step):
                    continue
                self.tables.grow(request, start + 1, step.new_blocks)
                step.filled.append((request, request.num_preemptions, start))
            assert request.slot is not None
            rows.append(ScheduledRow(request, request.slot, start, 1, True))
            if start >= longest:
                longest = start + 1
            request.num_computed_tokens = start + 1
            request.num_tokens += 1
        step.num_decodes = step.num_tokens = len(rows)
        step.longest_context = max(step.longest_context, longest)

    def _rejoin(self, request: Request, step: ScheduledStep) -> None:
        """The first token of a swapped request whose blocks are back, if they are.

        The host knows its last token, so it has a decode row, and joins with it.
        """
        start = request.num_computed_tokens
        if request.num_copies:
            return
        if start == len(request.block_ids[0]) * self.blocks.block_size:
            if not self._make_room(request, step):
                return
            self.tables.grow(request, start + 1, [])
        assert request.slot is not None
        self.swaps.release(request)
        self.tables.keep(request, start)
        step.new_blocks += self.tables.entries(request)
        step.rows.append(ScheduledRow(request, request.slot, start, 1, True))
        step.joins.append(step.rows[-1])
        step.longest_context = max(step.longest_context, start + 1)
        request.num_computed_tokens += 1
        request.num_tokens += 1
        request.decoding, request.returning = True, False

    def _claim_block(self, request: Request, step: ScheduledStep) -> None:
        """For a prompt that waits for blocks, take one a group from less urgent requests.

        Without less urgent ones it goes on waiting, and keeps what it has.
        """
        start = request.num_computed_tokens
        if (
            start == len(request.block_ids[0]) * self.blocks.block_size
            and self.blocks.num_free < self.blocks.num_groups
            and request is not self.running[-1]
            and self._make_room(request, step)
        ):
            self.tables.grow(request, start + 1, step.new_blocks)

    def _prefill(self, step: ScheduledStep, request: Request) -> None:
        """As many of a request's known tokens as the budget and the free blocks allow."""
        start = request.num_computed_tokens
        num_free = self.blocks.num_free // self.blocks.num_groups
        room = (len(request.block_ids[0]) + num_free) * self.blocks.block_size
        budget = self.max_num_batched_tokens - step.num_tokens
        if step.num_decodes and self.config.long_prefill_token_threshold:
            # The step would take as long as the prompt needs, and nobody has a token before.
            budget = min(budget, self.config.long_prefill_token_threshold)
        end = min(request.num_tokens, start + budget, room)
        if end == start:
            return  # waits for blocks, keeping its own unless a more urgent request needs them
        assert request.slot is not None
        self.tables.grow(request, end, step.new_blocks)
        samples = end == request.num_tokens
        step.rows.append(ScheduledRow(request, request.slot, start, end - start, samples))
        step.filled.append((request, request.num_preemptions, end))
        step.num_tokens += end - start
        step.longest_context = max(step.longest_context, end)
        request.num_computed_tokens = end
        self._prefilling = None if samples else request
        if samples:
            request.num_tokens += 1
            request.decoding = True

    def _admit(self, step: ScheduledStep) -> None:
        """Start waiting requests while there are slots, budget, and room for all their tokens."""
        index = 0  # of the next candidate; those before it wait for their parents
        while (
            index < len(self.waiting)
            and self._free_slots
            and self._prefilling is None
            and step.num_tokens < self.max_num_batched_tokens
        ):
            request = self.waiting[index]
            parent = request.parent
            if parent is not None and any(row.request is parent for row in step.prefill_rows):
                index += 1  # the parent's blocks can be copied once this step is launched
                continue
            if not self._begin(request, step):
                return
            del self.waiting[index]
            if request.status is RequestStatus.FINISHED or request.returning:
                continue
            self._prefill(step, request)
            step.joins.append(step.rows[-1])

    def _begin(self, request: Request, step: ScheduledStep) -> bool:
        """Make a waiting request run if there is room for all its tokens.

        Its first chunk may be shorter; but admitted with room for that alone, a long prompt stops
        half-way, is preempted and starts again (simulated with prompts of up to 4000 tokens in
        24000 places: 3.4 times the tokens needed, against 1.1).
        """
        if request.num_known_tokens < request.num_tokens:
            return False  # preempted with a token in flight, which it needs as input
        used = self.blocks.num_used
        if self._blocked is not None:
            blocked, used_then = self._blocked
            if request is blocked and used >= used_then and self.running:
                return False
        # A parent that runs has its whole prompt computed: nobody is admitted while it has not. One
        # that returns has its blocks back only later.
        parent = request.parent
        if parent is not None and (
            parent.slot is None or parent.returning or not request.may_share
        ):
            parent = None
        plan = self.tables.plan(request, parent)
        if not self.running:
            limit = self.blocks.num_blocks
        elif request.num_preemptions:
            limit = self._return_limit
        else:
            limit = self._admission_limit
        if used + plan.num_blocks > limit:
            self._blocked = request, used
            return False
        self._blocked = None
        swapped = request.status is RequestStatus.SWAPPED
        num_computed = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        request.parent = None  # from now on a request like others
        request.slot = self._free_slots.pop()
        insort(self.running, request, key=urgency)
        if request.num_preemptions:
            self.events.add("return", request.request_id, "swapped" if swapped else "recomputed")
        if not swapped:
            step.block_copies += self.tables.begin(request, plan, step.new_blocks)
            return True
        # The device learns of its table when it joins.
        self.tables.begin(request, plan, [])
        self.tables.grow(request, num_computed, [])
        request.num_computed_tokens = num_computed
        request.returning = True
        try:
            self.swaps.copy_in(request, plan.start // self.blocks.block_size)
        except CudaError as error:
            self._fail(request, error)
        return True
