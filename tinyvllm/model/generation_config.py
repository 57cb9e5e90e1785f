"""Sampling options that a model's author recommends, from `generation_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinyvllm.model.config import read_json
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

# The file's keys and SamplingParams' names, the same selection as vLLM's.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(directory: Path) -> dict[str, Any]:
    """Keyword arguments for SamplingParams; empty without the file.

    InputError, naming file, key and value, if SamplingParams would refuse one.
    """
    path = directory / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    defaults = {}
    for key, name in _NAMES.items():
        value = values.get(key)
        if value is not None:
            try:
                SamplingParams(**{name: value})
            except InputError as error:
                raise InputError(f"{path}: {key}: {error}") from error
            defaults[name] = value
    return defaults
