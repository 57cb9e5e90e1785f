"""The planner against an independent checker, which takes nothing from it but the offsets."""

import dataclasses
import itertools
import random

import pytest

from tinyvllm.engine.batch import step_limits
from tinyvllm.memory.plan import ALIGNMENT, Lifetime, plan_buffers
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.ops.executor import plan_program
from tinyvllm.ops.lower import lower
from tinyvllm.ops.program import OUTPUT, TEMP, concrete
from tinyvllm.util import DType


def check_plan(lives, plan):
    """Walks through the steps with a set of live buffers; returns their largest sum of bytes.

    lives: (name, bytes, first step, last step) of each buffer.
    """
    assert set(plan.offsets) == {name for name, *_ in lives}
    bound = 0
    for step in sorted({first for _, _, first, _ in lives}):
        live = [
            (plan.offsets[n], size, n) for n, size, first, last in lives if first <= step <= last
        ]
        live.sort()
        for (a, size, name), (b, _, other) in itertools.pairwise(live):
            assert a + size <= b, f"{name} and {other} overlap at step {step}"
        bound = max(bound, sum(size for _, size, _ in live))
    for name, size, _, _ in lives:
        assert plan.offsets[name] % ALIGNMENT == 0
        assert 0 <= plan.offsets[name] <= plan.arena_bytes - size
    assert bound <= plan.lower_bound <= plan.arena_bytes <= plan.bytes_without_reuse
    return bound


def program_lives(program, dims, itemsize):
    """Live intervals from the ops of a program, each view counted as its parent."""
    first, last = {}, {}
    for i, op in enumerate(program.ops):
        for name in op.operands.values():
            if name in program.buffers:
                name = program.buffers[name].parent or name
                first.setdefault(name, i)
                last[name] = i
    lives = []
    for b in program.buffers.values():
        if b.kind in (TEMP, OUTPUT) and b.parent is None and b.name in first:
            size = itemsize if b.dtype is None else b.dtype.itemsize
            for n in concrete(b.shape, dims):
                size *= n
            end = len(program.ops) if b.kind == OUTPUT else last[b.name]
            lives.append((b.name, size, first[b.name], end))
    return lives


@pytest.mark.parametrize("seed", range(100))
def test_random_lifetimes_never_overlap(seed):
    rng = random.Random(seed)
    lives = []
    for i in range(rng.randint(1, 60)):
        first = rng.randint(0, 50)
        size = rng.choice([0, 1, 255, 256, 257, rng.randint(1, 1 << 20)])
        role = rng.choice(["", "", "q", "k"])
        last = first + rng.choice([0, 1, 3, rng.randint(0, 50)])
        lives.append(Lifetime(f"b{i}", size, first, last, role))
    plan = plan_buffers(lives)
    check_plan([(b.name, b.size, b.first, b.last) for b in lives], plan)
    assert plan.arena_bytes <= 1.5 * plan.lower_bound


def test_the_checker_sees_an_overlap():
    lives = [Lifetime("a", 300, 0, 2), Lifetime("b", 300, 2, 3)]
    plan = plan_buffers(lives)
    assert plan.offsets["a"] != plan.offsets["b"], "alive together in step 2"
    broken = dataclasses.replace(plan, offsets={"a": 0, "b": 256})
    with pytest.raises(AssertionError, match="overlap at step 2"):
        check_plan([(b.name, b.size, b.first, b.last) for b in lives], broken)


def test_dead_memory_is_used_again_and_best_fit_keeps_the_large_gap():
    lives = [
        Lifetime("large", 4096, 0, 1),
        Lifetime("wall", 8192, 0, 9),
        Lifetime("small", 1024, 0, 1),
        Lifetime("large2", 4096, 3, 9),
        Lifetime("small2", 1024, 3, 9),
    ]
    plan = plan_buffers(lives)
    assert plan.arena_bytes == plan.lower_bound == 13312
    assert plan.bytes_without_reuse == 13312 + 5120


def test_of_two_free_regions_the_closer_in_size_is_taken():
    unit = ALIGNMENT
    lives = [
        Lifetime("floor", 8 * unit, 0, 9),
        Lifetime("leaves 6", 6 * unit, 0, 1),
        Lifetime("wall", 5 * unit, 0, 9),
        Lifetime("leaves 4", 4 * unit, 0, 1),
        Lifetime("ceiling", 3 * unit, 0, 9),
        Lifetime("new", 3 * unit, 3, 9),
    ]
    plan = plan_buffers(lives)
    assert plan.offsets["leaves 6"] < plan.offsets["leaves 4"]
    assert plan.offsets["new"] == plan.offsets["leaves 4"]


def test_a_buffer_in_the_way_is_placed_first_in_another_attempt():
    """By size alone `long` ends up above `big`, where it would need 7 units instead of 6."""
    unit = ALIGNMENT
    lives = [
        Lifetime("big", 4 * unit, 0, 1),
        Lifetime("beside", unit, 0, 2),
        Lifetime("over", unit, 1, 2),
        Lifetime("long", unit, 2, 4),
        Lifetime("late", 4 * unit - 1, 3, 4),
    ]
    plan = plan_buffers(lives)
    check_plan([(b.name, b.size, b.first, b.last) for b in lives], plan)
    assert plan.arena_bytes == plan.lower_bound == 6 * unit


def test_buffers_of_one_role_share_an_offset_unless_they_live_together():
    lives = [Lifetime("fixed", 512, 0, 9)]
    lives += [Lifetime(f"layer{i}.q", 1024, 2 * i, 2 * i, "q") for i in range(4)]
    lives += [Lifetime(f"layer{i}.x", 256, 2 * i, 2 * i + 3, "x") for i in range(4)]
    plan = plan_buffers(lives)
    check_plan([(b.name, b.size, b.first, b.last) for b in lives], plan)
    assert len({plan.offsets[f"layer{i}.q"] for i in range(4)}) == 1
    assert len({plan.offsets[f"layer{i}.x"] for i in range(4)}) > 1


def test_no_buffers():
    assert plan_buffers([]).arena_bytes == 0


# Sizes of a step: tokens, and rows that are sampled.
SIZES = [("prefill", 8192, 256), ("prefill", 8192, 1), ("prefill", 333, 7), ("decode", 8192, 256)]
SIZES += [("decode", n, n) for n in (1, 2, 7, 32, 100, 256)]
SIZES += [("primitive", n, min(n, 256)) for n in (1, 64, 8192)]


@pytest.mark.parametrize(("phase", "tokens", "rows"), SIZES)
@pytest.mark.parametrize("act", [DType.BF16, DType.F32])
def test_llama_needs_no_more_than_its_live_buffers_and_all_layers_agree(phase, tokens, rows, act):
    config = PRESETS["llama-3.2-1b"]
    program = lower(step_program(config, phase, block_size=16), phase)
    dims = {**step_limits(rows, tokens, 131072, 16), "NB": 1}
    plan = plan_program(program, dims, act)
    lives = program_lives(program, dims, act.itemsize)
    bound = check_plan(lives, plan)
    assert plan.arena_bytes <= 1.05 * max(bound, plan.lower_bound)
    assert plan.bytes_without_reuse > 2 * plan.arena_bytes

    layers = {}
    for name, offset in plan.offsets.items():
        if name.startswith("layer"):
            layer, _, role = name.partition(".")
            layers.setdefault(layer, {})[role] = offset
    assert len(layers) == config.num_hidden_layers
    # The last layer's output is `hidden`, which is kept to the end of the step.
    inner = [offsets for layer, offsets in layers.items() if layer != "layer15"]
    assert all(offsets == inner[0] for offsets in inner)
    assert layers["layer15"].items() <= inner[0].items()
