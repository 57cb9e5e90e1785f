"""Every kernel launch that the engine may ask for, from models that stand for all shapes.

Launches are pure functions of shapes, so walking representative programs over representative
sizes, with addresses left at 0, finds each specialisation without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tinyvllm.config import BLOCK_SIZES
from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import logprobs_program, score_program, step_program
from tinyvllm.ops.executor import described, writes_nothing
from tinyvllm.ops.lower import RULES, lower
from tinyvllm.ops.program import Program
from tinyvllm.ops.random_fill import fill_launches
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 96, 128, 129, 192, 255, 256, 257, 512)
CONTEXTS = (256, 8192, 131072)
PROMPTS = (1, 7, 16, 17, 33, 64, 65, 100, 128, 129, 256, 300, 512, 1024, 2048, 4096, 8192)


def models() -> list[ModelConfig]:
    """One-layer models: query heads per KV head from 1 to 8, both head sizes, biases, odd sizes."""
    base = replace(PRESETS["llama-3.2-1b"], num_hidden_layers=1)
    small = replace(
        base,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=49153,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    return [
        base,
        small,
        replace(base, num_key_value_heads=4, tie_word_embeddings=False),
        replace(small, num_key_value_heads=9, attention_bias=True, mlp_bias=True),
        replace(base, hidden_size=4096, head_dim=128, intermediate_size=14336),
        replace(base, hidden_size=3072, head_dim=128, num_attention_heads=24, vocab_size=32000),
        replace(base, head_dim=128, num_attention_heads=16, num_key_value_heads=16),
    ]


def all_launches(device: DeviceInfo) -> Iterator[Launch]:
    """Launches on this kind of device, many times the same specialisation at different sizes."""
    for act in (DType.BF16, DType.FP16):
        for config in models():
            yield from _model_launches(config, act, 16, device)
        for block_size in BLOCK_SIZES:
            yield from _model_launches(models()[0], act, block_size, device)
        for row_len in (64, 1):
            yield from fill_launches(
                0, act, key=0, base=0.0, scale=1.0, num_rows=8, row_len=row_len
            )


def _model_launches(
    config: ModelConfig, act: DType, block_size: int, device: DeviceInfo
) -> Iterator[Launch]:
    step = step_program(config, "step", block_size=block_size)
    for phase in RULES:
        sizes = (dims for dims in _sizes() if phase != "decode" or dims["D"] == dims["R"])
        yield from _launches(lower(step, phase), sizes, act, device)
    step = step_program(config, "step", block_size=block_size, sampler="adjust")
    yield from _launches(step, _sizes(), act, device)
    for program in (logprobs_program(config, "logprobs"), score_program(config, "score")):
        yield from _launches(program, _sizes(), act, device)


def _launches(
    program: Program, sizes: Iterable[dict[str, int]], act: DType, device: DeviceInfo
) -> Iterator[Launch]:
    for dims in sizes:
        for op in program.ops:
            if not writes_nothing(program, op, dims):
                operands = described(program, op, dims, act)
                yield from op_def(op.kind).launches(operands, device)


def _sizes() -> Iterator[dict[str, int]]:
    """Sizes of decode steps, whole prompts, and prompts mixed with decode rows."""
    fixed = {"MB": 8192, "NB": 1 << 16, "SLOTS": 512, "E": 512, "B": 2048, "CP": 8}
    fixed |= {"N": 256, "P": 20}
    contexts = [(n, 4096) for n in ROWS] + [(n, c) for n in (1, 32, 512) for c in CONTEXTS]
    for n, context in contexts:
        yield {**fixed, "C": context, "T": n, "R": n, "R1": n + 1, "S": n, "D": n, "Q": 0}
    fixed["C"] = CONTEXTS[-1]
    for n in PROMPTS:
        query = 1 << (n - 1).bit_length()
        yield {**fixed, "T": n, "R": 1, "R1": 2, "S": 0, "D": 0, "Q": query}
        yield {**fixed, "T": n + 3, "R": 4, "R1": 5, "S": 4, "D": 3, "Q": query}
