"""The scheduler drives a toy model whose next token depends on everything that attention reads.

The toy device knows only what a step tells it: it keeps block tables and last tokens by slot, and
(group, position, token, digest of all tokens so far) for each place of each block. A wrong table
entry, a block handed out too early, a token computed twice or never, a prefix taken for another:
each changes the output or trips an assertion. It also sees that no step writes to a block that has
a second user or is kept for the prefix cache, and that the contents of such blocks never change.
"""

import functools
import random
from collections import deque

import driving
import numpy as np
import pytest

from tinyvllm.engine.policy import AGEING, urgency
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.numpy_swapper import NumpySwapper
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

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


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_random_streams_match_naive_model(seed, lag):
    """Some 40,000 steps in all: without swap space, with little, and with much."""
    rng, swap_blocks = random.Random(seed), (0, 4, 1000)[seed % 3]
    seqs = rng.choice([1, 2, 3, 5])
    scheduler = make_scheduler(
        num_blocks=rng.choice([3, 5, 7, 12, 25]),
        block_size=rng.choice([1, 3, 4]),
        num_groups=rng.choice([1, 1, 2]),
        seqs=seqs,
        budget=seqs + rng.choice([0, 1, 6, 40]),
        max_len=rng.choice([8, 40]),
        scheduling_policy=rng.choice(["fcfs", "priority", "shortest"]),
        preemption_threshold=rng.choice([0.5, 0.85, 1.0]),
        enable_prefix_caching=rng.random() < 0.8,
        swap_blocks=swap_blocks,
        polls=rng.choice([0, 1, 5]),
        preemption_mode=rng.choice(["auto", "swap"]),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
    )
    stream = deque(random_stream(rng, scheduler, 18))
    requests, aborted = [], set()

    def arrive():
        for request in stream.popleft():
            requests.append(request)
            scheduler.add(request)

    def arrive_and_abort():
        while stream and rng.random() < 0.4:
            arrive()
        if requests and rng.random() < 0.03:
            victim = scheduler.abort(rng.choice(requests).request_id)
            if victim is not None:
                aborted.add(victim)
        if not scheduler.has_unfinished() and stream:
            arrive()

    device = ToyDevice(scheduler)
    finished = run_all(scheduler, device, lag, arrive_and_abort)

    assert not stream
    assert len(finished) == len(set(finished)) == len(requests) - len(aborted)
    assert set(finished) | aborted == set(requests)
    scheduler.end_copies()
    scheduler.check_integrity()
    assert scheduler.blocks.num_used == 0
    assert not swap_blocks or scheduler.swaps.swapper.space.num_used == 0
    assert not scheduler.running
    assert not scheduler.waiting
    for request in requests:
        output, reason, stop_reason = expected_output(request, scheduler)
        assert request.finished
        if request in aborted:
            assert request.finish_reason == "abort"
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == output
            assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_first_come_first_served():
    scheduler = make_scheduler(num_blocks=100, seqs=2)
    requests = [make_request(f"r{i}", [i], max_tokens=3) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    assert run_all(scheduler, ToyDevice(scheduler)) == requests


def test_decode_rows_come_first_and_prompts_share_the_rest():
    scheduler = make_scheduler(num_blocks=100, budget=10)
    device = ToyDevice(scheduler)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=9))
    scheduler.add(make_request("b", [4] * 12, max_tokens=9))
    scheduler.add(make_request("c", [5] * 2, max_tokens=9))

    def shape(step):
        return [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in step.rows]

    steps = []
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.update(step, device.run(step))
        steps.append(step)
    assert shape(steps[0]) == [("a", 0, 3, True), ("b", 0, 7, False)]
    assert shape(steps[1]) == [("a", 3, 1, True), ("b", 7, 5, True), ("c", 0, 2, True)]
    assert shape(steps[2]) == [("a", 4, 1, True), ("b", 12, 1, True), ("c", 2, 1, True)]
    assert [step.num_decodes for step in steps] == [0, 1, 3]
    assert [row.request.request_id for row in steps[1].joins] == ["c"]
    assert [len(step.sampling_rows) for step in steps] == [1, 3, 3]


def test_long_prompt_is_cut_smaller_while_others_decode():
    scheduler = make_scheduler(100, seqs=5, budget=16, long_prefill_token_threshold=3)
    scheduler.add(make_request("first", range(1, 21)))
    assert [r.num_tokens for r in scheduler.schedule().rows] == [16], "nobody decodes"
    for name, length in (("long", 8), ("short", 2)):
        scheduler.add(make_request(name, range(1, length + 1)))
    # The end of the first prompt, and what the budget leaves to others: nobody decodes yet.
    assert [r.num_tokens for r in scheduler.schedule().rows] == [4, 8, 2]
    scheduler.add(make_request("late", range(20, 27)))
    scheduler.add(make_request("last", range(1)))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [[r.num_tokens for r in step.prefill_rows] for step in steps] == [[3], [3], [1, 1]]
    assert [step.num_decodes for step in steps] == [3, 3, 3]


def test_latest_arrival_is_preempted_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=16)
    device = ToyDevice(scheduler)
    first = make_request("first", [1, 2, 3], max_tokens=6)
    second = make_request("second", [4, 5, 6], max_tokens=6)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):  # three prompt tokens, then the fourth: both hold two full blocks
        step = scheduler.schedule()
        scheduler.update(step, device.run(step))
    kept = list(second.output_token_ids)
    step = scheduler.schedule()
    assert step.preempted == [second]
    assert [row.request for row in step.rows] == [first]
    assert second.output_token_ids == kept
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert list(scheduler.waiting) == [second]
    scheduler.add(make_request("third", [7], max_tokens=1))
    scheduler.update(step, device.run(step))
    finished = run_all(scheduler, device)
    assert [request.request_id for request in finished] == ["first", "third", "second"]
    assert second.output_token_ids == expected_output(second, scheduler)[0]


def test_ahead_of_the_tokens_no_row_is_launched_past_its_length():
    scheduler = make_scheduler(num_blocks=10)
    request = make_request("a", [1, 2], max_tokens=2)
    scheduler.add(request)
    device = ToyDevice(scheduler)
    steps = [scheduler.schedule(), scheduler.schedule()]
    tokens = [device.run(step) for step in steps]
    assert scheduler.schedule() is None
    assert scheduler.has_unfinished()
    assert scheduler.update(steps[0], tokens[0]) == []
    assert scheduler.update(steps[1], tokens[1]) == [request]


def test_token_launched_after_the_end_is_dropped():
    end = next_token([1, 2])
    scheduler = make_scheduler(num_blocks=10)
    request = make_request("a", [1, 2], eos=[end])
    scheduler.add(request)
    device = ToyDevice(scheduler)
    steps = [scheduler.schedule(), scheduler.schedule()]
    tokens = [device.run(step) for step in steps]
    assert scheduler.update(steps[0], tokens[0]) == [request]
    assert scheduler.update(steps[1], tokens[1]) == []
    assert request.output_token_ids == [end]


END = next_token([1, 2])


@pytest.mark.parametrize(
    ("eos", "options", "ends"),
    [
        ([END], {}, (1, "stop", None)),
        ([END + 1, END], {}, (1, "stop", None)),
        ([END], {"max_tokens": 1}, (1, "stop", None)),
        ([END], {"ignore_eos": True, "max_tokens": 2}, (2, "length", None)),
        ([], {"stop_token_ids": [END]}, (1, "stop", END)),
        ([END], {"stop_token_ids": [END], "ignore_eos": True}, (1, "stop", END)),
        ([], {"max_tokens": 3}, (3, "length", None)),
        ([], {"max_tokens": None}, (10, "length", None)),  # max_model_len 12
    ],
)
def test_ends(eos, options, ends):
    scheduler = make_scheduler(num_blocks=10, max_len=12)
    request = make_request("a", [1, 2], eos=eos, **options)
    scheduler.add(request)
    assert run_all(scheduler, ToyDevice(scheduler)) == [request]
    assert (len(request.output_token_ids), request.finish_reason, request.stop_reason) == ends


def test_sequence_that_outgrows_the_whole_cache_ends_by_length():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    request = make_request("a", [1] * 12, max_tokens=None)
    other = make_request("b", [1] * 5, max_tokens=None)
    scheduler.add(request)
    scheduler.add(other)
    assert run_all(scheduler, ToyDevice(scheduler)) == [request, other]
    # 12 tokens fit; the 13th is sampled from them and need not be stored.
    assert [request.num_known_tokens, other.num_known_tokens] == [13, 13]
    assert request.finish_reason == other.finish_reason == "length"


def test_abort_frees_at_once_wherever_the_request_is():
    scheduler = make_scheduler(num_blocks=10, seqs=1)
    running, waiting = make_request("a", [1] * 9), make_request("b", [2])
    scheduler.add(running)
    scheduler.add(waiting)
    step = scheduler.schedule()
    assert scheduler.abort("b") is waiting
    assert scheduler.abort("a") is running
    assert scheduler.blocks.num_free == 10
    assert not scheduler.has_unfinished()
    assert scheduler.update(step, [1]) == []
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert running.output_token_ids == []
    assert scheduler.abort("a") is None
    scheduler.check_integrity()
    scheduler.add(make_request("a", [1]))  # the id is free again


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"priority": 0.5}, "priority=0.5: must be an integer"),
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, r"64 tokens; it may have 63, .* max_model_len=64"),
        ([1] * 13, {}, "13 tokens needs 4 KV blocks of 4 tokens; the cache has 3"),
        ([1, VOCAB], {}, r"prompt\[1\]=50: token ids are from 0 to 49"),
        ([-1], {}, r"prompt\[0\]=-1"),
        ([1.0], {}, r"prompt\[0\]=1.0: a token id is an integer"),
        ([True], {}, r"prompt\[0\]=True"),
        ([1], {"stop_token_ids": [50]}, r"stop_token_ids\[0\]=50"),
    ],
)
def test_request_that_can_never_run_is_refused(prompt, options, message):
    scheduler = make_scheduler(num_blocks=3)
    with pytest.raises(InputError, match=f"request 'a': .*{message}"):
        scheduler.add(make_request("a", prompt, **options))
    assert not scheduler.has_unfinished()


def test_longest_prompt_is_accepted():
    scheduler = make_scheduler(num_blocks=16, max_len=64)
    request = make_request("a", [1] * 63, max_tokens=None)
    scheduler.add(request)
    run_all(scheduler, ToyDevice(scheduler))
    assert len(request.output_token_ids) == 1


def test_id_in_use_is_refused():
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(make_request("a", [1]))
    with pytest.raises(InputError, match=r"'a'.* not finished"):
        scheduler.add(make_request("a", [2]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.blocks.allocate(1), "requests hold 1 blocks, counted 2"),
        (lambda s: s._free_slots.pop(), "slots .* are not each of 0..3 once"),
        (lambda s: s.waiting.pop(), r"queues hold arrivals \[0\], not all once"),
        (lambda s: s.blocks.keep(s.running[0].block_ids[0]), r"in the tree \[\], .* kept \[0\]"),
        (lambda s: s.running.append(s.waiting.pop()) or s.running.reverse(), "out of order"),
    ],
)
def test_integrity_check_finds_damage(damage, message):
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add(make_request("a", [1]))
    scheduler.schedule()
    scheduler.add(make_request("b", [1]))
    scheduler.check_integrity()
    damage(scheduler)
    with pytest.raises(RuntimeError, match=message):
        scheduler.check_integrity()


def test_blocks_of_prompts_are_found_once_their_step_is_launched():
    """Before its tokens are there; what was sampled enters the cache when its values are known."""
    scheduler = make_scheduler(20, budget=16)
    device = ToyDevice(scheduler)
    scheduler.add(make_request("first", range(9), max_tokens=9))
    steps = [scheduler.schedule()]
    scheduler.add(make_request("second", range(9), max_tokens=1))
    tokens = [device.run(steps[0])]
    scheduler.launched(steps[0])
    for _ in range(4):  # the last begins the first block after one with sampled tokens
        steps.append(scheduler.schedule())
        tokens.append(device.run(steps[-1]))
        scheduler.launched(steps[-1])
    assert [(r.start, r.num_tokens) for r in steps[1].prefill_rows] == [(8, 1)], "two blocks found"
    first = steps[0].rows[0].request
    assert (steps[-1].rows[0].start, first.num_kept_blocks) == (12, 2)
    for step, sampled in zip(steps, tokens, strict=True):
        scheduler.update(step, sampled)
        scheduler.check_integrity()
    assert first.num_kept_blocks == 3


def step_once(scheduler, device):
    step = scheduler.schedule()
    check_step(scheduler, step)
    return step, scheduler.update(step, device.run(step))


def ids(requests):
    return [request.request_id for request in requests]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", "abcd"), ("priority", "cabd"), ("shortest", "cdba")],
)
def test_order_of_admission(policy, order):
    scheduler = make_scheduler(num_blocks=40, seqs=1, scheduling_policy=policy)
    for name, length, priority in [("a", 9, 0), ("b", 5, 1), ("c", 2, -1), ("d", 2, 1)]:
        scheduler.add(make_request(name, [1] * length, priority=priority, max_tokens=2))
    assert "".join(ids(run_all(scheduler, ToyDevice(scheduler)))) == order


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
def test_nobody_starves_in_a_stream_that_never_ends(policy):
    """One slot, and a short prompt comes each step: the queue only grows."""
    scheduler = make_scheduler(num_blocks=40, seqs=1, scheduling_policy=policy)
    device = ToyDevice(scheduler)
    for i in range(5):
        scheduler.add(make_request(f"before{i}", [i], max_tokens=1))
    long = make_request("long", [1] * 60, max_tokens=1)
    scheduler.add(long)
    for i in range(20):
        scheduler.add(make_request(f"short{i}", [i], max_tokens=1))
        step_once(scheduler, device)
    # At the most: five before it, those of the next 60 / AGEING steps, and four chunks of its own.
    assert 5 + 60 / AGEING + 4 < 20
    assert long.finished
    assert scheduler.waiting


def test_least_urgent_is_preempted_whichever_came_first():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    device = ToyDevice(scheduler)
    low = make_request("low", [1, 2, 3], max_tokens=6, priority=1)
    high = make_request("high", [4, 5, 6], max_tokens=6)
    scheduler.add(low)
    scheduler.add(high)
    for _ in range(2):
        step_once(scheduler, device)
    step, _ = step_once(scheduler, device)
    assert step.preempted == [low]
    assert ids(run_all(scheduler, device)) == ["high", "low"]
    assert low.output_token_ids == expected_output(low, scheduler)[0]


def test_urgent_request_waits_for_a_place_but_takes_blocks_once_it_runs():
    scheduler = make_scheduler(
        num_blocks=8, block_size=2, seqs=3, budget=4, scheduling_policy="priority"
    )
    device = ToyDevice(scheduler)
    low = make_request("low", [1], max_tokens=12, priority=1)
    scheduler.add(low)
    step_once(scheduler, device)
    urgent = make_request("urgent", [4] * 13, max_tokens=2)
    scheduler.add(urgent)
    preempted = []
    while not urgent.finished:
        preempted += step_once(scheduler, device)[0].preempted
    assert preempted == [low]
    assert urgent.num_preemptions == 0
    run_all(scheduler, device)
    assert low.output_token_ids == expected_output(low, scheduler)[0]


def test_prompt_that_waits_for_blocks_takes_those_of_the_less_urgent():
    scheduler = make_scheduler(num_blocks=5, block_size=4, seqs=2, budget=4)
    device = ToyDevice(scheduler)
    low = make_request("low", [1] * 3, max_tokens=20, priority=1)
    urgent = make_request("urgent", [2] * 16, max_tokens=1)
    scheduler.add(low)
    step_once(scheduler, device)
    scheduler.add(urgent)
    for _ in range(4):  # 3 tokens of the prompt a step; the other takes the fifth block meanwhile
        assert not step_once(scheduler, device)[0].preempted
    assert (urgent.num_computed_tokens, scheduler.blocks.num_free) == (12, 0)
    step, _ = step_once(scheduler, device)
    assert step.preempted == [low]
    assert low.num_tokens <= 8, "it had room left in its own"
    assert ids(row.request for row in step.rows) == ["urgent"]
    run_all(scheduler, device)
    assert low.output_token_ids == expected_output(low, scheduler)[0]


def test_threshold_holds_back_admission_and_more_so_the_return():
    scheduler = make_scheduler(num_blocks=20, block_size=1, seqs=4, preemption_threshold=0.85)
    first = make_request("first", [1] * 9, max_tokens=None)
    scheduler.add(first)
    scheduler.add(make_request("more", [2] * 9))
    scheduler.add(make_request("fits", [3] * 2))
    step = scheduler.schedule()
    assert ids(scheduler.running) == ["first"], "9 + 9 blocks are above 17, and none overtakes"
    scheduler.abort("more")
    scheduler.update(step, [1])
    scheduler.schedule()
    assert ids(scheduler.running) == ["first", "fits"], "10 + 2 blocks are not"

    scheduler = make_scheduler(num_blocks=20, block_size=1, seqs=4, preemption_threshold=0.85)
    device = ToyDevice(scheduler)
    first = make_request("first", [1] * 8, max_tokens=6)
    second = make_request("second", [2] * 9, max_tokens=None)
    scheduler.add(first)
    scheduler.add(second)
    while not second.num_preemptions:
        step_once(scheduler, device)
    assert first.num_tokens + second.num_tokens > 16, "it may return at 16 blocks, not at 17"
    while not first.finished:
        assert scheduler.running == [first]
        step_once(scheduler, device)
    step_once(scheduler, device)
    assert scheduler.running == [second], "alone, it may go beyond the threshold"
    run_all(scheduler, device)
    assert second.num_known_tokens == 21
    assert second.num_preemptions == 1


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("length", "start"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_equal_prompt_computes_at_least_one_token(length, start, lag):
    scheduler = make_scheduler(num_blocks=20)
    device = ToyDevice(scheduler)
    prompt = list(range(length))
    for name in "abc":
        request = make_request(name, prompt, max_tokens=3)
        scheduler.add(request)
        run_all(scheduler, device, lag)
        assert request.output_token_ids == expected_output(request, scheduler)[0]
        assert request.num_cached_tokens == (0 if name == "a" else start)
    cache = scheduler.tables.cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (3 * length, 2 * start)


def test_outputs_enter_the_cache_but_no_token_of_a_discarded_row():
    scheduler = make_scheduler(num_blocks=20, block_size=2)
    output = expected_output(make_request("", [1, 2], max_tokens=4), scheduler)[0]
    request = make_request("a", [1, 2], eos=[output[3]])
    assert output[3] not in output[:3]
    scheduler.add(request)
    device = ToyDevice(scheduler)
    run_all(scheduler, device, lag=2)
    assert request.output_token_ids == output
    # Six tokens are known; the last was an input only of rows that were discarded.
    path = scheduler.tables.cache.lookup([1, 2, *output, 0, 0])
    assert [entry.tokens for entry in path] == [(1, 2), tuple(output[:2])]


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {"presence_penalty": 0.5}])
def test_requests_that_look_at_each_token_compute_all(options):
    scheduler = make_scheduler(num_blocks=20)
    device = ToyDevice(scheduler)
    first = make_request("a", range(9), max_tokens=2, **options)
    scheduler.add(first)
    scheduler.add(make_request("b", range(9), parent=first, max_tokens=2, **options))
    run_all(scheduler, device)
    assert device.num_computed == 2 * 10
    plain = make_request("c", range(9), max_tokens=2)
    scheduler.add(plain)
    run_all(scheduler, device)
    assert plain.num_cached_tokens == 8, "what they computed is of use to others"


@pytest.mark.parametrize(
    ("length", "num_copies", "num_blocks"), [(1, 0, 3), (7, 2, 4), (8, 2, 4), (9, 0, 5), (10, 2, 5)]
)
def test_samples_share_the_blocks_of_their_prompt(length, num_copies, num_blocks):
    scheduler = make_scheduler(num_blocks=20, enable_prefix_caching=False)
    device = ToyDevice(scheduler)
    parent = make_request("p", range(length), max_tokens=6)
    children = [make_request(f"p.{i}", range(length), parent=parent, max_tokens=6) for i in (1, 2)]
    other = make_request("other", [1], max_tokens=6)
    for request in (parent, *children, other):
        scheduler.add(request)
    step, _ = step_once(scheduler, device)
    assert ids(row.request for row in step.rows) == ["p", "other"], "samples are passed over"
    scheduler.abort("other")
    step, _ = step_once(scheduler, device)
    assert len(step.block_copies) == num_copies
    assert [(row.start, row.num_tokens) for row in step.joins] == [(length - 1, 1)] * 2
    grown = length % 4 == 0  # the parent's next token begins a block
    assert scheduler.blocks.num_used == num_blocks + grown
    scheduler.abort("p")
    run_all(scheduler, device)
    for request in children:
        assert request.output_token_ids == expected_output(request, scheduler)[0]
    assert scheduler.blocks.num_used == 0


def test_sample_without_its_parent_is_a_request_like_others():
    scheduler = make_scheduler(num_blocks=20, seqs=1)
    device = ToyDevice(scheduler)
    parent = make_request("p", range(9), max_tokens=2)
    child = make_request("p.1", range(9), parent=parent, max_tokens=2)
    scheduler.add(parent)
    scheduler.add(child)
    assert run_all(scheduler, device) == [parent, child]
    assert child.output_token_ids == parent.output_token_ids
    assert child.num_cached_tokens == 8, "found in the prefix cache"


def test_tokens_with_equal_hashes_share_nothing():
    modulus = (1 << 61) - 1  # of the hash of an int
    scheduler = make_scheduler(num_blocks=20, block_size=2, vocab=1 << 62)
    device = ToyDevice(scheduler)
    prompts = [[1, 2, 3, 4], [1 + modulus, 2, 3, 4], [1, 2, 3 + modulus, 4]]
    for i, prompt in enumerate(prompts):
        assert hash(tuple(prompt)) == hash(tuple(prompts[0]))
        request = make_request(str(i), [*prompt, 5], max_tokens=3)
        scheduler.add(request)
        run_all(scheduler, device)
        assert request.output_token_ids == expected_output(request, scheduler)[0]
        assert request.num_cached_tokens == (2 if i == 2 else 0)


def test_caching_changes_no_token_and_saves_work():
    computed, outputs = [], []
    for caching in (False, True):
        rng = random.Random(5)
        scheduler = make_scheduler(num_blocks=30, enable_prefix_caching=caching)
        device = ToyDevice(scheduler)
        requests = [request for group in random_stream(rng, scheduler, 40) for request in group]
        for request in requests:
            scheduler.add(request)
        run_all(scheduler, device, lag=1)
        computed.append(device.num_computed)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    assert computed[1] < 0.9 * computed[0]


def test_abort_in_flight_drops_tokens_and_blocks_once():
    scheduler = make_scheduler(num_blocks=10)
    device = ToyDevice(scheduler)
    request = make_request("a", range(9))
    scheduler.add(request)
    steps = [scheduler.schedule(), scheduler.schedule()]
    tokens = [device.run(step) for step in steps]
    scheduler.abort("a")
    again = make_request("a", range(9), max_tokens=1)
    scheduler.add(again)
    last = scheduler.schedule()
    last_tokens = device.run(last)
    for step, sampled in zip(steps, tokens, strict=True):
        assert scheduler.update(step, sampled) == []
        scheduler.check_integrity()
    assert scheduler.blocks.num_cached == 0, "blocks that were given back are not cached"
    assert scheduler.update(last, last_tokens) == [again]
    assert request.output_token_ids == []
    assert scheduler.blocks.num_cached == 2


def test_stop_string_ends_a_request_even_after_its_length():
    scheduler = make_scheduler(num_blocks=10)
    device = ToyDevice(scheduler)
    running, ended = make_request("a", [1], max_tokens=5), make_request("b", [1], max_tokens=1)
    scheduler.add(running)
    scheduler.add(ended)
    assert step_once(scheduler, device)[1] == [ended]
    for request in (running, ended):
        scheduler.stop(request, "end")
        assert (request.finish_reason, request.stop_reason) == ("stop", "end")
    assert not scheduler.has_unfinished()
    assert scheduler.blocks.num_used == 0
    scheduler.check_integrity()


def test_update_and_schedule_touch_the_cache_only_when_a_block_fills():
    scheduler = make_scheduler(num_blocks=20, block_size=8)
    scheduler.add(make_request("a", [1], max_tokens=20))
    device = ToyDevice(scheduler)
    filled = [len(step_once(scheduler, device)[0].filled) for _ in range(18)]
    assert [i for i, n in enumerate(filled) if n] == [0, 8, 16]


def test_copies_of_what_is_no_longer_the_next_victim_make_room():
    """Copies of `old`, made while it was the last, fill the swap space when `new` needs some."""
    scheduler = make_scheduler(
        12, swap_blocks=5, polls=0, preemption_mode="swap", preemption_threshold=0.6
    )
    device = ToyDevice(scheduler)

    def step():
        scheduled = scheduler.schedule()
        check_step(scheduler, scheduled)
        scheduler.update(scheduled, device.run(scheduled))

    urgent = make_request("urgent", [2] * 16, priority=-1, max_tokens=10)
    old = make_request("old", [1] * 7, max_tokens=26)
    scheduler.add(urgent)
    scheduler.add(old)
    while not urgent.finished:
        step()
    assert old.num_host_blocks >= 2
    new = make_request("new", [3] * 5, priority=1, max_tokens=24)
    scheduler.add(new)
    run_all(scheduler, device)
    assert old.num_preemptions == 0 and new.num_preemptions == 1
    assert scheduler.num_preemptions == {"swap": 1, "recompute": 0}
