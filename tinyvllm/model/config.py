"""A model's configuration, checked, from `config.json` in transformers 4's or 5's key names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.model.registry import ARCHITECTURES
from tinyvllm.ops.attention import HEAD_DIMS  # those that kernels exist for
from tinyvllm.util import DType, InputError, short_repr

ROPE_KINDS = ("default", "linear", "llama3")
_DTYPES = {d.value: d for d in (DType.BF16, DType.FP16, DType.F32)}
_MAX_JSON_BYTES = 16 << 20


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling. Fields that a kind does not use keep their default."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of dimensions: float32[head_dim / 2]."""
        freq = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            freq /= self.factor
        elif self.kind == "llama3":
            # Turns that a pair makes within the original context: pairs with many stay as they
            # are, pairs with few are slowed by the factor, between them the two are blended.
            turns = self.original_max_position_embeddings * freq / (2 * math.pi)
            low, high = self.low_freq_factor, self.high_freq_factor
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
            freq *= keep + (1 - keep) / self.factor
        return freq.astype(np.float32)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the program, the loader and the planner need to know of a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: DType
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None

    @property
    def max_context(self) -> int:
        """Longest sequence that full attention computes as the model means it."""
        limit = self.max_position_embeddings
        return limit if self.sliding_window is None else min(limit, self.sliding_window)

    def check_max_model_len(self, max_model_len: int) -> None:
        """InputError if the model was not made for sequences of this many tokens."""
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise InputError(
                f"max_model_len={max_model_len}: the model attends within a sliding window, which "
                f"is not supported; without it at most sliding_window={self.sliding_window}"
            )
        if max_model_len > self.max_position_embeddings:
            raise InputError(
                f"max_model_len={max_model_len}: the model ends at "
                f"max_position_embeddings={self.max_position_embeddings}"
            )

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Read `config.json` and, where it exists, `generation_config.json`."""
        generation = path / "generation_config.json"
        return cls.from_dict(
            read_json(path / "config.json"),
            read_json(generation) if generation.exists() else None,
            source=str(path / "config.json"),
        )

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        source: str = "config.json",
    ) -> ModelConfig:
        """Check and convert; InputError names `source`, key, value and limit."""
        keys = _Keys(config, source)
        architecture = _architecture(keys)
        for key in ("quantization_config", "compression_config"):
            if config.get(key) is not None:
                raise keys.error(key, "quantised checkpoints are not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise keys.error("hidden_act", "only 'silu' is supported")

        mistral = architecture == "MistralForCausalLM"
        hidden_size = keys.integer("hidden_size", 8, 1 << 17, multiple=8)
        num_heads = keys.integer("num_attention_heads", 1, 1024)
        num_kv_heads = keys.integer("num_key_value_heads", 1, 1024, default=num_heads)
        if num_heads % num_kv_heads:
            raise keys.error("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
        head_dim = keys.integer("head_dim", 1, 1 << 16, default=hidden_size // num_heads)
        if head_dim not in HEAD_DIMS:
            raise InputError(
                f"{source}: head_dim={head_dim} (hidden_size={hidden_size}, "
                f"num_attention_heads={num_heads}): must be 64 or 128"
            )
        vocab_size = keys.integer("vocab_size", 1, 1 << 22)
        # transformers' MistralConfig has a window where the file says nothing; null means none.
        window_default = 4096 if mistral and "sliding_window" not in config else None
        dtype_key = "dtype" if config.get("dtype") is not None else "torch_dtype"
        dtype_name = keys.text(dtype_key, tuple(_DTYPES), default="float32")
        eos = _token_ids(keys, vocab_size)
        if generation_config is not None:
            eos |= _token_ids(_Keys(generation_config, f"{source} (generation_config)"), vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size", 8, 1 << 19, multiple=8),
            num_hidden_layers=keys.integer("num_hidden_layers", 1, 1024),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
            rope=_rope(keys),
            max_position_embeddings=keys.integer(
                "max_position_embeddings", 1, 1 << 24, default=131072 if mistral else 2048
            ),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attention_bias=not mistral and keys.flag("attention_bias"),
            mlp_bias=not mistral and keys.flag("mlp_bias"),
            dtype=_DTYPES[dtype_name],
            bos_token_id=keys.optional_integer("bos_token_id", 0, vocab_size - 1),
            eos_token_ids=tuple(sorted(eos)),
            sliding_window=keys.optional_integer("sliding_window", 1, 1 << 24, window_default),
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; InputError if it is anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_JSON_BYTES:
        raise InputError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


class _Keys:
    """Typed access to the keys of one JSON object, with errors that say where the value stands."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, key: str, limit: str) -> InputError:
        if key not in self.values:
            return InputError(f"{self.source}: {key} is missing: {limit}")
        return InputError(f"{self.source}: {key}={short_repr(self.values[key])}: {limit}")

    def integer(
        self, key: str, low: int, high: int, default: int | None = None, multiple: int = 1
    ) -> int:
        """An integer in [low, high] that `multiple` divides; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer from {low} to {high}")
        if value % multiple:
            raise self.error(key, f"must be a multiple of {multiple}")
        return value

    def optional_integer(
        self, key: str, low: int, high: int, default: int | None = None
    ) -> int | None:
        return default if self.values.get(key) is None else self.integer(key, low, high)

    def number(self, key: str, above: float, high: float, default: float | None = None) -> float:
        """A number in (above, high]."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        # A NaN fails the comparison; so does an integer too large for a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "must be a number")
        if not above < value <= high:
            raise self.error(key, f"must be above {above:g} and at most {high:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return bool(value)

    def text(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"must be one of {', '.join(choices)}")
        return value


def _architecture(keys: _Keys) -> str:
    names = keys.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    raise keys.error("architectures", f"must name one of {', '.join(ARCHITECTURES)}")


def _token_ids(keys: _Keys, vocab_size: int) -> set[int]:
    """`eos_token_id`, which is an id, a list of ids or null."""
    value = keys.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise keys.error("eos_token_id", f"ids must be integers from 0 to {vocab_size - 1}")
    return set(ids)


def _rope(keys: _Keys) -> RopeConfig:
    """`rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    old, new = keys.values.get("rope_scaling"), keys.values.get("rope_parameters")
    key = "rope_scaling" if new is None else "rope_parameters"
    if old is not None and new is not None and old != new:
        raise keys.error("rope_scaling", "contradicts rope_parameters")
    if not isinstance(keys.values.get(key) or {}, Mapping):
        raise keys.error(key, "must be an object or null")
    rope = _Keys(keys.values.get(key) or {}, f"{keys.source}: {key}")
    kind_key = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.text(kind_key, ROPE_KINDS, default="default")
    theta_owner = rope if rope.values.get("rope_theta") is not None else keys
    theta = theta_owner.number("rope_theta", 0.0, 1e12, default=10000.0)
    for owner in (rope, keys):
        if owner.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise owner.error("partial_rotary_factor", "only 1 is supported")
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor", 0.0, 1e6)
    if factor < 1:
        raise rope.error("factor", "must be at least 1")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = rope.number("low_freq_factor", 0.0, 1e6)
    high = rope.number("high_freq_factor", 0.0, 1e6)
    if low >= high:
        raise rope.error("low_freq_factor", f"must be below high_freq_factor={high:g}")
    original = rope.integer("original_max_position_embeddings", 1, 1 << 24)
    return RopeConfig(theta, kind, factor, low, high, original)
