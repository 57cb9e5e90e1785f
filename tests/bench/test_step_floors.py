"""Floors of steps against those of decode steps, and against sums by hand."""

import pytest

from tinyvllm.bench.floors import Rates, step_floor
from tinyvllm.bench.step_floors import StepFloors, StepWork
from tinyvllm.engine.request import Request
from tinyvllm.engine.step import ScheduledRow, ScheduledStep
from tinyvllm.model.presets import PRESETS
from tinyvllm.sampling_params import SamplingParams

MODEL = PRESETS["llama-3.2-1b"]
COPY, FLOPS = 4e12, 700e12


@pytest.fixture(scope="module")
def floors():
    return StepFloors(MODEL, 16, Rates(COPY, FLOPS))


@pytest.mark.parametrize("batch, context", [(1, 256), (32, 4096), (256, 256)])
def test_decode_steps_have_the_floor_that_bench_latency_shows(floors, batch, context):
    work = StepWork(batch, batch, batch, batch * context, ())
    _, want = step_floor(MODEL, 16, batch, context, Rates(COPY, FLOPS))
    assert floors.seconds(work) == pytest.approx(want, rel=0.02)


def test_a_prompts_floor_is_its_operations(floors):
    """Products of 8192 tokens, half of all pairs for attention, the head for one row alone."""
    weights = 16 * (3072 * 2048 + 2048 * 2048 + 16384 * 2048 + 2048 * 8192)
    products = 2 * 8192 * weights + 16 * 4 * 2048 * 8192 * 8193 / 2
    want = products / FLOPS + 128256 * 2048 * 2 / COPY
    seconds = floors.seconds(StepWork(8192, 0, 1, 0, ((0, 8192),)))
    assert want < seconds < 1.15 * want  # norms, RoPE and the rest move bytes


def test_chunks_see_what_came_before(floors):
    whole = floors.seconds(StepWork(2048, 0, 1, 0, ((0, 2048),)))
    second = floors.seconds(StepWork(2048, 0, 1, 0, ((2048, 2048),)))
    pairs = 2048 * 2048
    assert second - whole == pytest.approx(16 * 4 * 2048 * pairs / FLOPS, rel=1e-3)
    both = [StepWork(2048, 0, 1, 0, ((0, 2048),)), StepWork(2048, 0, 1, 0, ((2048, 2048),))]
    assert floors.total(both) == whole + second


def test_work_of_a_step_counts_its_rows():
    params = SamplingParams()
    rows = [
        ScheduledRow(Request("a", [1], params), 0, 9, 1, True),
        ScheduledRow(Request("b", [1], params), 1, 4, 1, True),
        ScheduledRow(Request("c", [1] * 40, params), 2, 16, 8, False),
    ]
    step = ScheduledStep(rows, num_decodes=2, num_tokens=10)
    assert StepWork.of(step) == StepWork(10, 2, 2, 10 + 5, ((16, 8),))
