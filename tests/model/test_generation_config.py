"""Recommended sampling options: which are taken, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyvllm.model.generation_config import generation_defaults
from tinyvllm.util import InputError


def test_selected_keys(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    values = {
        "temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_new_tokens": 7, "do_sample": True, "eos_token_id": [1, 2], "num_beams": 4,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert generation_defaults(tmp_path) == {
        "temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_tokens": 7,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text('{"temperature": null, "top_p": 1}')
    assert generation_defaults(tmp_path) == {"top_p": 1}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 2.5),
        ("top_p", 1.5),
        ("min_p", [0]),
        ("repetition_penalty", True),
        ("max_new_tokens", 0),
    ],
)
def test_refused_values(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(InputError, match=rf"generation_config\.json: {key}: \w+=.*: must be"):
        generation_defaults(tmp_path)
