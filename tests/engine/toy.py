"""A toy model for the scheduler: its next token depends on everything that attention reads.

The toy device knows only what a step tells it: it keeps block tables and last tokens by slot, and
(group, position, token, digest of all tokens so far) for each place of each block. A wrong table
entry, a block handed out too early, a token computed twice or never, a prefix taken for another:
each changes the output or trips an assertion. It also sees that no step writes to a block that has
a second user or is kept for the prefix cache, and that the contents of such blocks never change.
"""

import functools
from collections import deque

import driving
import numpy as np

from tinyvllm.engine.policy import urgency
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.numpy_swapper import NumpySwapper
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.sampling_params import SamplingParams

VOCAB = 50


def next_token(context):
    value = 7
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def digest_of(digest, token):
    return (digest * 1_000_033 + token + 1) % ((1 << 61) - 3)


def make_scheduler(
    num_blocks,
    block_size=4,
    num_groups=1,
    swap_blocks=0,
    polls=2,
    **options,
):
    """`polls`: how often a copy is asked for before it is done."""
    if swap_blocks:
        space = SwapSpace(swap_blocks, block_size * np.dtype(object).itemsize)
        space.blocks_per_slab = 3
        options["swapper"] = NumpySwapper(space, polls)
    sizes = {"seqs": 4, "budget": 16, "max_len": 64, "vocab": VOCAB, "preemption_threshold": 1.0}
    blocks = BlockManager(num_blocks, block_size, num_groups)
    return driving.make_scheduler(blocks, **{**sizes, **options})


def make_request(name, prompt, eos=(), priority=0, parent=None, **options):
    params = SamplingParams(**options)
    return Request(name, list(prompt), params, eos, priority=priority, parent=parent)


class ToyDevice:
    """Runs steps in order and checks that each row finds what it needs in its blocks."""

    def __init__(self, scheduler):
        blocks = self.blocks = scheduler.blocks
        self.block_size = blocks.block_size
        self.num_groups = blocks.num_groups
        self.places = np.full((blocks.num_blocks, blocks.block_size), None, object)
        self.swaps = scheduler.swaps
        if self.swaps.swapper is not None:
            self.swaps.swapper.attach(self.places)
            self.swap_in, self.swaps.swapper.swap_in = self.swaps.swapper.swap_in, self.arrive
        shape = range(scheduler.max_num_seqs)
        self.tables = [[{} for _ in shape] for _ in range(blocks.num_groups)]
        self.last_token = [None for _ in shape]
        self.next_start = [None for _ in shape]  # where the slot's row must go on
        self.owner = [None for _ in shape]
        self.immutable = {}  # block: its contents, while it is shared or kept
        self.num_steps = 0
        self.num_computed = 0

    def run(self, step):
        self.check_immutable()
        for source, target in step.block_copies:
            assert self.blocks.ref_count(source) > 0
            self.check_writable(target)
            self.places[target] = self.places[source]
        for row in step.joins:
            self.owner[row.slot] = row.request.request_id
            self.next_start[row.slot] = row.start
            # A decode row that joins is given its token; a prefill row has no use for it.
            self.last_token[row.slot] = row.request.tokens(row.start, row.start + 1)[0]
            for tables in self.tables:
                tables[row.slot].clear()
        for group, slot, index, block in step.new_blocks:
            assert index == len(self.tables[group][slot]), "table entries come in order, once"
            self.tables[group][slot][index] = block
        for i, row in enumerate(step.rows):
            self.write(row, decode=i < step.num_decodes)
        # All writes before all reads: a block that two rows of this step share shows up here.
        sampled = []
        for row in step.rows:
            end = row.start + row.num_tokens
            self.next_start[row.slot] = end
            context = self.read(row.slot, end)
            if row.samples:
                self.last_token[row.slot] = next_token(context)
                sampled.append(self.last_token[row.slot])
        self.check_immutable()
        self.num_steps += 1
        self.num_computed += step.num_tokens
        return sampled

    def write(self, row, decode):
        assert self.owner[row.slot] == row.request.request_id
        assert self.next_start[row.slot] == row.start, "each token once a residency, in order"
        if decode:
            assert row.num_tokens == 1
            assert row.samples
            tokens = [self.last_token[row.slot]]
            assert tokens != [None]
        else:
            tokens = row.request.tokens(row.start, row.start + row.num_tokens)
        assert len(tokens) == row.num_tokens > 0
        # The digest stands for K and V of the layers above the first, which depend on all before.
        digest = functools.reduce(digest_of, self.read(row.slot, row.start), 0)
        for position, token in enumerate(tokens, start=row.start):
            digest = digest_of(digest, token)
            for group in range(self.num_groups):
                block, offset = self._place(group, row.slot, position)
                self.check_writable(block)
                self.places[block][offset] = (group, position, token, digest)

    def read(self, slot, end):
        """The tokens that attention finds through the block tables."""
        context, digest = [], 0
        for position in range(end):
            for group in range(self.num_groups):
                block, offset = self._place(group, slot, position)
                assert self.blocks.ref_count(block) > 0
                of_group, at, token, found = self.places[block][offset]
                assert (of_group, at, found) == (group, position, digest_of(digest, token))
            context.append(token)
            digest = found
        return context

    def arrive(self, pairs):
        """In place of the swapper's `swap_in`."""
        for block, _ in pairs:
            self.check_writable(block)
            self.immutable.pop(block, None)
        return self.swap_in(pairs)

    def check_writable(self, block):
        assert self.blocks.ref_count(block) == 1
        assert not self.blocks.is_kept(block)

    def check_immutable(self):
        arriving = set()
        if self.swaps.swapper is not None:
            for ticket in self.swaps.swapper.under_way:
                arriving.update(device for device, _ in ticket.pairs if not ticket.out)
        now = {
            block: tuple(self.places[block])
            for block in range(self.blocks.num_blocks)
            if block not in arriving
            if self.blocks.is_kept(block) or self.blocks.ref_count(block) > 1
        }
        for block in now.keys() & self.immutable.keys():
            assert now[block] == self.immutable[block], "a shared block changed"
        self.immutable = now

    def _place(self, group, slot, position):
        block = self.tables[group][slot][position // self.block_size]
        return block, position % self.block_size


def expected_output(request, scheduler):
    """The naive model: one sequence alone, with the whole context at hand."""
    params, tokens = request.params, list(request.prompt_token_ids)
    num_prompt = len(tokens)
    while True:
        tokens.append(next_token(tokens))
        output = tokens[num_prompt:]
        if tokens[-1] in request.stop_set:
            by_id = tokens[-1] in params.stop_token_ids
            return output, "stop", tokens[-1] if by_id else None
        if (
            len(output) == params.max_tokens
            or len(tokens) == scheduler.max_model_len
            or len(tokens) > scheduler.blocks.max_tokens
        ):
            return output, "length", None


def check_step(scheduler, step):
    assert 0 < step.num_tokens <= scheduler.max_num_batched_tokens
    assert step.num_tokens == sum(row.num_tokens for row in step.rows)
    slots = [row.slot for row in step.rows]
    assert len(set(slots)) == len(slots)
    assert all(row.request.slot == row.slot for row in step.rows)
    begun = [row for row in step.prefill_rows if row in step.joins]
    assert not (step.preempted and begun)
    assert step.longest_context == max(row.start + row.num_tokens for row in step.rows)
    assert step.decode_rows + step.prefill_rows == step.rows
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for request in step.preempted:
        swapped = request.status is RequestStatus.SWAPPED
        assert swapped or request.status is RequestStatus.WAITING
        assert bool(request.host_block_ids) == swapped
        assert request.slot is None
        assert request.block_ids == []
        assert all(urgency(request) > urgency(other) for other in scheduler.running)
    if begun and len(scheduler.running) > 1:
        used, total = scheduler.blocks.num_used, scheduler.blocks.num_blocks
        returned = begun[-1].request.num_preemptions > 0
        assert used <= total * (scheduler.preemption_threshold - 0.05 * returned) + 1e-9
    # Nobody starves: every running sequence past its prompt that may grow has its row, but for
    # those that wait for blocks which copies hold.
    rows = {row.request.request_id for row in step.rows}
    without = [
        request
        for request in scheduler.running
        if request.decoding and request.num_tokens < request.max_total_tokens
        if request.request_id not in rows
    ]
    assert len(without) * scheduler.blocks.num_groups <= step.num_awaited
    assert not step.num_awaited or scheduler.swaps.busy
    scheduler.check_integrity()


def run_all(scheduler, device, lag=0, between=lambda: None, max_steps=10_000):
    """Step until all is done; `lag` steps stay in flight before their tokens are read."""
    finished, in_flight = [], deque()
    for _ in range(max_steps):
        between()
        step = scheduler.schedule()
        finished += scheduler.take_failed()
        if step is not None:
            check_step(scheduler, step)
            in_flight.append((step, device.run(step)))
            scheduler.launched(step)
        elif not in_flight and any(request.returning for request in scheduler.running):
            scheduler.wait_for_copy()  # if there was something to copy
        elif not in_flight and scheduler.swaps.busy:
            scheduler.wait_for_copy()
        elif not in_flight:
            assert not scheduler.has_unfinished(), "stuck"
            return finished
        while len(in_flight) > lag or (step is None and in_flight):
            finished += scheduler.update(*in_flight.popleft())
            scheduler.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def random_stream(rng, scheduler, count):
    """Groups of requests with one prompt; prompts often begin alike."""
    longest = min(scheduler.max_model_len - 1, scheduler.blocks.max_tokens)
    beginnings = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(2)]
    for i in range(count):
        num_prompt = rng.choice([1, rng.randint(1, longest), rng.randint(1, min(longest, 5))])
        prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
        if rng.random() < 0.6:
            shared = rng.choice([num_prompt, rng.randint(0, num_prompt)])
            prompt[:shared] = rng.choice(beginnings)[:shared]
        options = {
            "eos": (3, 4) if rng.random() < 0.5 else (),
            "priority": rng.choice([0, 0, 1, 2]),
            "max_tokens": rng.choice([1, rng.randint(1, 30), 30, None]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.sample(range(VOCAB), rng.choice([0, 0, 1])),
            "prompt_logprobs": rng.choice([None, None, None, 1]),
            "presence_penalty": rng.choice([0.0, 0.0, 0.0, 0.5]),
        }
        group = [make_request(f"r{i}", prompt, **options)]
        for n in range(1, rng.choice([1, 1, 2, 4])):
            group.append(make_request(f"r{i}.{n}", prompt, parent=group[0], **options))
        yield group


def step_once(scheduler, device):
    step = scheduler.schedule()
    check_step(scheduler, step)
    return step, scheduler.update(step, device.run(step))


def ids(requests):
    return [request.request_id for request in requests]
