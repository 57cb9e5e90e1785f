"""The engine's configuration as options of a command that a benchmark starts."""

from __future__ import annotations

from dataclasses import fields

from tinyvllm.config import EngineConfig


def options_of(config: EngineConfig) -> list[str]:
    """The options that differ from their defaults, as the command line takes them."""
    options = []
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        else:
            options += [f"--{name}", str(value)]
    return options
