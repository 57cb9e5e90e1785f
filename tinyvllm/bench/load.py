"""`tinyvllm bench load`: the rate at which weights come from safetensors onto the device."""

from __future__ import annotations

import json
import logging
import struct
import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from tinyvllm.config import EngineConfig
from tinyvllm.engine.backend import open_backend
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.hub import resolve_model
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.util import InputError, start_logger


def bench_load(config: EngineConfig) -> None:
    """Writes safetensors of the preset's shape to a temporary directory and loads them twice."""
    if config.model not in PRESETS:
        raise InputError(f"model={config.model!r}: must be one of {', '.join(PRESETS)}")
    logging.getLogger().setLevel(logging.INFO)  # the rate is in the log
    start_logger.setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(PRESETS[config.model], Path(directory))
        for _ in range(2):
            model = resolve_model(directory, "safetensors")
            open_backend(replace(config, model=directory), model).close()


def write_checkpoint(model: ModelConfig, directory: Path) -> None:
    """A safetensors file and config.json of this shape, with arbitrary small bf16 values."""
    config = {
        "architectures": [model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "head_dim": model.head_dim,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": model.tie_word_embeddings,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, weight in step_program(model, "shapes", block_size=16).weights.items():
        size = prod(weight.shape) * 2
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    # bf16 bits from 0x3c00 to 0x3cff: values from 0.0078 to 0.031.
    piece = (np.random.default_rng(0).integers(0, 256, 1 << 23, np.uint16) | 0x3C00).tobytes()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while end > 0:
            end -= file.write(piece[: min(end, len(piece))])
