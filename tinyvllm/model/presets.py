"""Built-in model shapes, and random weights that any device computes to the same bits."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np

from tinyvllm.model.config import ModelConfig, RopeConfig
from tinyvllm.model.programs import step_program
from tinyvllm.model.source import check_span, missing_tensor, store
from tinyvllm.ops.random_fill import dummy_values
from tinyvllm.util import DType

PRESETS = {
    "llama-3.2-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        dtype=DType.BF16,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )
}

_CHUNK = 1 << 16  # elements made and rounded at a time
_UNIFORM_STD = 32768 / math.sqrt(3)  # of the integers from -32768 to 32767
_LOGITS_STD = 2.0
_LINEAR_STD = 1.4
_NORM_STD = 0.1
_BIAS_STD = 0.02


class DummyRule(NamedTuple):
    """What `dummy_values` and the kernel that fills weights on the device make a tensor from."""

    key: int  # 32 bits
    base: float
    scale: float


class DummySource:
    """TensorSource of random weights for a configuration: never constant, the same everywhere."""

    def __init__(self, config: ModelConfig) -> None:
        program = step_program(config, "dummy", block_size=16)
        self._shapes = {name: weight.shape for name, weight in program.weights.items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise missing_tensor("dummy weights", name)
        return self._shapes[name]

    def rule(self, name: str) -> DummyRule:
        """How to make this tensor.

        Standard deviations are chosen so that a random model behaves like a model: the logits
        come out near 2, and layers add so much that greedy output does not repeat its input (with
        half of it, a tied head finds the last token again and again).
        """
        shape = self.shape(name)
        key = zlib.crc32(name.encode())
        if name.endswith("norm.weight"):
            return DummyRule(key, 1.0, _scale(_NORM_STD))
        if name.endswith(".bias"):
            return DummyRule(key, 0.0, _scale(_BIAS_STD))
        is_head = name in ("model.embed_tokens.weight", "lm_head.weight")
        std = (_LOGITS_STD if is_head else _LINEAR_STD) / math.sqrt(shape[1])
        return DummyRule(key, 0.0, _scale(std))

    def read(self, name: str, dtype: DType, out: np.ndarray, start: int = 0) -> None:
        check_span(name, math.prod(self.shape(name)), dtype, out, start)
        key, base, scale = self.rule(name)
        for begin in range(0, out.size, _CHUNK):
            piece = out[begin : begin + _CHUNK]
            values = dummy_values(key, start + begin, piece.size, base, scale)
            store("dummy weights", name, values, dtype, piece)

    def close(self) -> None:
        pass


def _scale(std: float) -> float:
    return float(np.float32(std / _UNIFORM_STD))
