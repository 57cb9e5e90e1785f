"""Presets and dummy weights: shapes, statistics, and the same values however they are read."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tinyvllm.model.presets import PRESETS, DummySource
from tinyvllm.ops.random_fill import dummy_values
from tinyvllm.util import DType, InputError

LLAMA = PRESETS["llama-3.2-1b"]
SMALL = replace(LLAMA, num_hidden_layers=1, attention_bias=True, mlp_bias=True)


def test_the_reference_model_has_its_size() -> None:
    source = DummySource(LLAMA)
    assert len(source.names()) == 2 + 16 * 9
    assert sum(math.prod(source.shape(n)) for n in source.names()) == 1_235_814_400
    assert source.shape("model.layers.15.self_attn.k_proj.weight") == (512, 2048)
    with pytest.raises(InputError, match=r"no tensor named 'lm_head\.weight'"):
        source.shape("lm_head.weight")


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("model.norm.weight", 1.0, 0.1),
        ("model.embed_tokens.weight", 0.0, 2 / math.sqrt(2048)),
        ("model.layers.0.mlp.down_proj.weight", 0.0, 1.4 / math.sqrt(8192)),
        ("model.layers.0.self_attn.q_proj.bias", 0.0, 0.02),
    ],
)
def test_statistics(name: str, mean: float, std: float) -> None:
    source = DummySource(SMALL)
    out = np.empty(min(math.prod(source.shape(name)), 1 << 20), np.float32)
    source.read(name, DType.F32, out)
    assert out.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(out.size))
    assert out.std() == pytest.approx(std, rel=0.05)


def test_tensors_differ_and_pieces_agree() -> None:
    source = DummySource(SMALL)
    keys = {source.rule(name).key for name in source.names()}
    assert len(keys) == len(source.names())
    name = "model.layers.0.mlp.up_proj.weight"
    key, base, scale = source.rule(name)
    assert np.float32(base) == base and np.float32(scale) == scale
    for start, count in ((0, 200_000), (12_345, 70_000), (2048 * 8192 - 5, 5)):
        out = np.empty(count, np.uint16)
        source.read(name, DType.BF16, out, start)
        expected = DType.BF16.encode(dummy_values(key, start, count, base, scale))
        np.testing.assert_array_equal(out, expected)
    source.close()
