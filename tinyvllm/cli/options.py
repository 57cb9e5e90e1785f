"""Command-line options generated from the configuration classes."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from tinyvllm.cli.unsupported import UNSUPPORTED, Refused
from tinyvllm.config import EngineConfig

Commands = Any  # what argparse's add_subparsers returns; its class has no public name


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the default of each option that has one, unless its help does."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        said = "default" in (action.help or "")
        if said or default is False or default in (None, ""):
            return action.help
        if isinstance(default, (list, tuple)):  # as it would be given
            return f"{action.help} (default: {' '.join(map(str, default))})"
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that says in two lines what is wrong: all options would hide it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        usage = f"usage: {self.prog} ... (see {self.prog} --help)"
        self.exit(2, f"{usage}\n{self.prog}: error: {message}\n")


def add_options(
    parser: argparse.ArgumentParser, config: type[Any], leave_out: str | None = None
) -> None:
    """Adds an option for each field of a dataclass: `max_model_len` becomes `--max-model-len`."""
    group = parser.add_argument_group(config.__name__)
    types = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name == leave_out or not field.metadata["cli"]:
            continue
        hint = types[field.name]
        options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        kinds = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
        sequences = [t for t in (hint, *kinds) if typing.get_origin(t) is Sequence]
        if kinds == [bool]:
            options["action"] = argparse.BooleanOptionalAction
        elif sequences:
            options |= {"type": typing.get_args(sequences[0])[0], "action": "append"}
            options |= {"default": None, "help": f"{options['help']}; may be repeated"}
        else:
            options |= {"type": kinds[0], "choices": field.metadata["choices"]}
        group.add_argument("--" + field.name.replace("_", "-"), **options)
    if config is EngineConfig:
        for name in UNSUPPORTED:
            parser.add_argument(
                "--" + name.replace("_", "-"), action=Refused, nargs="?", help=argparse.SUPPRESS
            )


def from_args(config: type[Any], args: argparse.Namespace, leave_out: str | None = None) -> Any:
    """The dataclass that `add_options` made options for."""
    values = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(config)
        if f.metadata["cli"] and f.name != leave_out
    }
    return config(**{name: value for name, value in values.items() if value is not None})
