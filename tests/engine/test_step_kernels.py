"""The kernels found before the first step are those that steps then ask for."""

from dataclasses import replace

import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.driver.devices import DEVICES
from tinyvllm.engine.batch import SCORE_ROWS, row_bucket, size_class, step_limits
from tinyvllm.engine.sizing import engine_limits, engine_programs
from tinyvllm.engine.step_kernels import first_kernels, step_kernels
from tinyvllm.model.presets import PRESETS
from tinyvllm.ops.executor import described, writes_nothing
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

CONFIG = EngineConfig(model="llama-3.2-1b", max_num_seqs=256, max_num_batched_tokens=8192)
LIMITS = engine_limits(CONFIG, 16384, num_blocks=4096)
PROGRAMS = engine_programs(
    CONFIG, replace(PRESETS["llama-3.2-1b"], num_hidden_layers=1), primitive=False
)
# (rows that decode, tokens of the prompt beside them, longest context)
DECODES = [(n, 0, context) for n in range(1, 257) for context in (200, 5000)]
MIXED = [(d, t, max(t, c)) for d in (0, 1, 30, 255) for t in range(1, 7900, 79) for c in (0, 9000)]


def asked_for(program, decodes, prompt, context, info):
    """Specialisations that the program needs in such a step."""
    if prompt:
        rows, tokens = decodes + 1, decodes + prompt
    else:
        rows = tokens = decodes = row_bucket(decodes, LIMITS["R"])
    query = size_class(prompt) if prompt else 0
    dims = {"T": tokens, "R": rows, "R1": rows + 1, "S": rows, "D": decodes, "Q": query}
    dims = {**LIMITS, **dims, "C": size_class(context, 256)}
    for op in program.ops:
        if not writes_nothing(program, op, dims):
            operands = described(program, op, dims, DType.BF16)
            yield from (launch.spec for launch in op_def(op.kind).launches(operands, info))


@pytest.mark.parametrize("info", [DEVICES["sm_80"], DEVICES["sm_90a"]], ids=lambda i: i.name)
def test_what_steps_ask_for_is_found(info):
    found = set(step_kernels(PROGRAMS, LIMITS, DType.BF16, info))
    assert len(found) <= 80
    used = set()
    for program in PROGRAMS:
        sizes = DECODES[::7] if program.name.startswith("decode") else MIXED[::7]
        for size in sizes:
            used.update(asked_for(program, *size, info))
    assert not used - found


@pytest.mark.parametrize("info", [DEVICES["sm_80"], DEVICES["sm_90a"]], ids=lambda i: i.name)
def test_what_scoring_prompts_asks_for_is_found_where_few_rows_decode(info):
    (score,) = (p for p in PROGRAMS if p.name == "score")
    limits = {**LIMITS, **step_limits(2, 8192, 16384, 16)}
    found = set(step_kernels([score], limits, DType.BF16, info))
    for positions in range(1, SCORE_ROWS + 1):
        dims = {**limits, "N": positions}
        for op in score.ops:
            operands = described(score, op, dims, DType.BF16)
            used = {one.spec for one in op_def(op.kind).launches(operands, info)}
            assert used <= found, positions


@pytest.mark.parametrize("info", [DEVICES["sm_80"], DEVICES["sm_90a"]], ids=lambda i: i.name)
def test_kernels_of_a_plain_request_s_first_steps_are_found_apart(info):
    first = set(first_kernels(PROGRAMS, LIMITS, DType.BF16, info))
    used = set()
    for program in PROGRAMS:
        if program.name == "prefill.plain":
            used.update(asked_for(program, 0, 8, 8, info))
        elif program.name == "decode.plain":
            used.update(asked_for(program, 1, 0, 9, info))
    assert first == used
    every = set(step_kernels(PROGRAMS, LIMITS, DType.BF16, info))
    assert 8 < len(used) < len(every) / 2 and used <= every
