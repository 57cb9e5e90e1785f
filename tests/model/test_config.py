"""ModelConfig: both generations of key names, and every bad value named."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm.model.config import ModelConfig, RopeConfig, read_json
from tinyvllm.util import DType, InputError

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", ["llama3_rope", "llama_sharded", "mistral", "llama_bias"])
def test_both_key_generations_say_the_same(golden: Path, name: str) -> None:
    directory = golden / name
    old = ModelConfig.from_directory(directory)
    generation = read_json(directory / "generation_config.json")
    new = ModelConfig.from_dict(read_json(directory / "config_v5.json"), generation)
    assert old == new
    assert old.dtype is DType.BF16 and old.eos_token_ids == (2,) and old.vocab_size == 512
    assert old.head_dim == (128 if name in ("llama_sharded", "mistral") else 64)
    assert old.attention_bias == old.mlp_bias == (name == "llama_bias")
    assert old.rope.kind == ("llama3" if name == "llama3_rope" else "default")
    assert old.tie_word_embeddings == (name in ("llama3_rope", "llama_bias"))
    assert old.max_context == 2048


def test_legacy_rope_type_key() -> None:
    linear = {"type": "linear", "factor": 2.0}
    assert ModelConfig.from_dict({**GOOD, "rope_scaling": linear}).rope == RopeConfig(
        500000.0, "linear", 2.0
    )


def test_eos_ids_are_united() -> None:
    config = ModelConfig.from_dict({**GOOD, "eos_token_id": [3, 2]}, {"eos_token_id": [2, 7]})
    assert config.eos_token_ids == (2, 3, 7)
    assert ModelConfig.from_dict({**GOOD, "eos_token_id": None}).eos_token_ids == ()


def test_sliding_window_limits_the_context() -> None:
    mistral = {**GOOD, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    assert ModelConfig.from_dict({**mistral, "sliding_window": None}).max_context == 32768
    windowed = ModelConfig.from_dict(mistral)  # absent means transformers' 4096
    assert windowed.max_context == 4096
    windowed.check_max_model_len(4096)
    with pytest.raises(InputError, match=r"max_model_len=4097.*sliding_window=4096"):
        windowed.check_max_model_len(4097)
    with pytest.raises(InputError, match=r"2049.*max_position_embeddings=2048"):
        ModelConfig.from_dict(GOOD).check_max_model_len(2049)


BAD = [
    ("architectures", ["GPT2LMHeadModel"], "LlamaForCausalLM"),
    ("architectures", "LlamaForCausalLM", "architectures"),
    ("architectures", [], "architectures"),
    ("quantization_config", {"quant_method": "awq"}, "quantised"),
    ("hidden_act", "gelu", "silu"),
    ("hidden_size", 132, "multiple of 8"),
    ("hidden_size", True, "integer"),
    ("hidden_size", 128.0, "integer"),
    ("hidden_size", "128", "integer"),
    ("hidden_size", 10**30, "integer from 8"),
    ("hidden_size", -128, "integer from 8"),
    ("hidden_size", None, "integer from 8"),
    ("intermediate_size", 350, "multiple of 8"),
    ("num_hidden_layers", 0, "integer from 1"),
    ("num_key_value_heads", 3, "divide"),
    ("num_attention_heads", 4, "head_dim=32"),
    ("head_dim", 96, "head_dim=96"),
    ("rms_norm_eps", math.nan, "above 0"),
    ("rms_norm_eps", 0, "above 0"),
    ("rms_norm_eps", "1e-5", "number"),
    ("rope_theta", math.inf, "at most"),
    ("rope_theta", -1.0, "above 0"),
    ("rope_theta", 10**400, "at most"),
    ("rope_scaling", "linear", "object"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "yarn.*one of"),
    ("rope_scaling", {"rope_type": ["llama3"]}, "one of"),
    ("rope_scaling", {"rope_type": "linear"}, "factor"),
    ("rope_scaling", {"rope_type": "linear", "factor": 0.5}, "at least 1"),
    ("rope_scaling", {**LLAMA3, "low_freq_factor": 4.0}, "below high_freq_factor"),
    ("rope_scaling", {**LLAMA3, "original_max_position_embeddings": 0}, "integer from 1"),
    ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "only 1"),
    ("vocab_size", 1 << 40, "integer from 1"),
    ("eos_token_id", 512, "from 0 to 511"),
    ("eos_token_id", [2, True], "from 0 to 511"),
    ("bos_token_id", -1, "from 0 to 511"),
    ("tie_word_embeddings", 1, "true or false"),
    ("torch_dtype", "float8_e4m3fn", "bfloat16"),
    ("max_position_embeddings", 0, "integer from 1"),
    ("sliding_window", 0, "integer from 1"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD)
def test_bad_values_are_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        ModelConfig.from_dict({**GOOD, key: value}, source="dir/config.json")
    assert "dir/config.json" in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "architectures"])
def test_missing_keys_are_named(key: str) -> None:
    config = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(InputError, match=f"{key} is missing"):
        ModelConfig.from_dict(config)


def test_contradicting_rope_keys() -> None:
    both = {**GOOD, "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(InputError, match="contradicts"):
        ModelConfig.from_dict(both)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"[" * 100000, b'{"a": \xff}', b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_bad_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_json(tmp_path / "config.json")


def test_numbers_of_any_type_never_escape_input_error() -> None:
    """Every key with every odd value: a configuration or an InputError, nothing else."""
    odd = [None, True, -1, 0, 1.5, math.nan, math.inf, 1e30, 10**30, "x", [], {}, [None], {"a": 1}]
    keys = [*GOOD, "rope_scaling", "rope_parameters", "head_dim", "sliding_window", "dtype",
            "quantization_config", "hidden_act", "attention_bias"]  # fmt: skip
    for key in keys:
        for value in odd:
            try:
                ModelConfig.from_dict({**GOOD, key: value}, {"eos_token_id": value})
            except InputError:
                continue


def test_inverse_frequencies() -> None:
    """Against the published formula, written out pair by pair."""
    rope = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    expected = []
    for i in range(32):
        freq = 500000.0 ** (-2 * i / 64)
        wavelength = 2 * math.pi / freq
        if wavelength > 8192 / 1.0:
            freq /= 32.0
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            freq = (1 - smooth) * freq / 32.0 + smooth * freq
        expected.append(freq)
    freq = rope.inv_freq(64)
    assert freq.dtype == np.float32 and freq.shape == (32,)
    np.testing.assert_allclose(freq, expected, rtol=1e-7)
    plain = RopeConfig(10000.0).inv_freq(128)
    np.testing.assert_allclose(RopeConfig(10000.0, "linear", 4.0).inv_freq(128), plain / 4)
    assert plain[0] == 1.0


def test_numbers_survive_json() -> None:
    """What json reads from a file is what from_dict takes."""
    assert ModelConfig.from_dict(json.loads(json.dumps(GOOD))) == ModelConfig.from_dict(GOOD)
