"""The scheduler drives a toy model whose next token depends on everything that attention reads.

The toy device knows only what a step tells it: it keeps block tables and last tokens by slot, and
(owner, position, token) for each place of each block. A wrong table entry, a block handed out too
early, a token computed twice or never: each changes the output or trips an assertion.
"""

import random
from collections import deque

import pytest

from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

VOCAB = 50


def next_token(context):
    value = 7
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def make_scheduler(num_blocks, block_size=4, num_groups=1, seqs=4, budget=16, max_len=64):
    return Scheduler(
        BlockManager(num_blocks, block_size, num_groups),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        vocab_size=VOCAB,
    )


def make_request(name, prompt, eos=(), **options):
    return Request(name, list(prompt), SamplingParams(**options), eos)


class ToyDevice:
    """Runs steps in order and checks that each row finds what it needs in its blocks."""

    def __init__(self, scheduler):
        blocks = scheduler.blocks
        self.block_size = blocks.block_size
        self.num_groups = blocks.num_groups
        self.places = [[None] * blocks.block_size for _ in range(blocks.num_blocks)]
        shape = range(scheduler.max_num_seqs)
        self.tables = [[{} for _ in shape] for _ in range(blocks.num_groups)]
        self.last_token = [None for _ in shape]
        self.next_start = [None for _ in shape]  # where the slot's row must go on
        self.owner = [None for _ in shape]

    def run(self, step):
        for row in step.joins:
            self.owner[row.slot] = row.request.request_id
            self.next_start[row.slot] = 0
            self.last_token[row.slot] = None
            for tables in self.tables:
                tables[row.slot].clear()
        for group, slot, index, block in step.new_blocks:
            assert index == len(self.tables[group][slot]), "table entries come in order, once"
            self.tables[group][slot][index] = block
        inputs = {}
        for i, row in enumerate(step.rows):
            name = row.request.request_id
            assert self.owner[row.slot] == name
            assert self.next_start[row.slot] == row.start, "each token once a residency, in order"
            if i < step.num_decodes:
                assert row.num_tokens == 1
                assert row.samples
                tokens = [self.last_token[row.slot]]
                assert tokens != [None]
            else:
                tokens = row.request.tokens(row.start, row.start + row.num_tokens)
            assert len(tokens) == row.num_tokens > 0
            inputs[row.slot] = tokens
            for position, token in enumerate(tokens, start=row.start):
                for group in range(self.num_groups):
                    places, offset = self._place(group, row.slot, position)
                    places[offset] = (name, group, position, token)
        # All writes before all reads: a block that two rows of this step share shows up here.
        sampled = []
        for row in step.rows:
            end = row.start + row.num_tokens
            self.next_start[row.slot] = end
            context = []
            for position in range(end):
                for group in range(self.num_groups):
                    places, offset = self._place(group, row.slot, position)
                    owner, of_group, at, token = places[offset]
                    assert (owner, of_group, at) == (row.request.request_id, group, position)
                context.append(token)
            if row.samples:
                self.last_token[row.slot] = next_token(context)
                sampled.append(self.last_token[row.slot])
        return sampled

    def _place(self, group, slot, position):
        block = self.tables[group][slot][position // self.block_size]
        return self.places[block], position % self.block_size


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
    assert not (step.preempted and step.joins)
    assert all(row.start == 0 for row in step.joins)
    assert step.decode_rows + step.prefill_rows == step.rows
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for request in step.preempted:
        assert request.status is RequestStatus.WAITING
        assert request.slot is None
        assert request.block_ids == []
        assert all(request.arrival > row.request.arrival for row in step.decode_rows)
    # Nobody starves: every running sequence past its prompt that may grow has its row.
    rows = {row.request.request_id for row in step.rows}
    for request in scheduler.running:
        if request.decoding and request.num_tokens < request.max_total_tokens:
            assert request.request_id in rows
    scheduler.check_integrity()


def run_all(scheduler, device, lag=0, between=lambda: None, max_steps=10_000):
    """Step until all is done; `lag` steps stay in flight before their tokens are read."""
    finished, in_flight = [], deque()
    for _ in range(max_steps):
        between()
        step = scheduler.schedule()
        if step is not None:
            check_step(scheduler, step)
            in_flight.append((step, device.run(step)))
        elif not in_flight:
            assert not scheduler.has_unfinished(), "stuck"
            return finished
        while len(in_flight) > lag or (step is None and in_flight):
            finished += scheduler.update(*in_flight.popleft())
            scheduler.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def random_stream(rng, scheduler, count):
    longest = min(scheduler.max_model_len - 1, scheduler.blocks.max_tokens)
    for i in range(count):
        num_prompt = rng.choice([1, rng.randint(1, longest), rng.randint(1, min(longest, 5))])
        yield make_request(
            f"r{i}",
            [rng.randrange(VOCAB) for _ in range(num_prompt)],
            eos=(3, 4) if rng.random() < 0.5 else (),
            max_tokens=rng.choice([1, rng.randint(1, 30), 30, None]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 1])),
        )


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_random_streams_match_naive_model(seed, lag):
    rng = random.Random(seed)
    seqs = rng.choice([1, 2, 3, 5])
    num_groups = rng.choice([1, 1, 2])
    scheduler = make_scheduler(
        num_blocks=rng.choice([3, 5, 7, 12, 25]),
        block_size=rng.choice([1, 3, 4]),
        num_groups=num_groups,
        seqs=seqs,
        budget=seqs + rng.choice([0, 1, 6, 40]),
        max_len=rng.choice([8, 40]),
    )
    stream = deque(random_stream(rng, scheduler, 25))
    requests, aborted = [], set()

    def arrive_and_abort():
        while stream and rng.random() < 0.4:
            requests.append(stream.popleft())
            scheduler.add(requests[-1])
        if requests and rng.random() < 0.03:
            victim = scheduler.abort(rng.choice(requests).request_id)
            if victim is not None:
                aborted.add(victim)
        if not scheduler.has_unfinished() and stream:
            requests.append(stream.popleft())
            scheduler.add(requests[-1])

    finished = run_all(scheduler, ToyDevice(scheduler), lag, arrive_and_abort)

    assert not stream
    assert len(finished) == len(set(finished)) == len(requests) - len(aborted)
    assert set(finished) | aborted == set(requests)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
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


@pytest.mark.parametrize("seqs", [0, 5])
def test_budget_below_one_token_a_sequence_is_refused(seqs):
    with pytest.raises(InputError, match=rf"max_num_seqs={seqs}.*max_num_batched_tokens=4"):
        make_scheduler(num_blocks=3, seqs=seqs, budget=4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.blocks.allocate(1), "requests hold 1 blocks, counted 2"),
        (lambda s: s._free_slots.pop(), "slots .* are not each of 0..3 once"),
        (lambda s: s.waiting.pop(), r"queues hold arrivals \[0\]"),
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
