"""What the subcommands of `tinyvllm bench` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tinyvllm.cli.options import add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.util import InputError

PHASES = ("decode", "prefill")


def pair(text: str) -> tuple[int, int]:
    """Two numbers, as in 32x1024."""
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be two numbers, as in 32x1024")
    return int(first), int(second)


def finish(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, EngineConfig], None],
    *,
    as_json: bool = False,
    runs_on_cpu: bool = False,
) -> None:
    """Adds the engine's options, with `as_json` the option --json, and what `main` calls.

    `runs_on_cpu`: what can run there too, but only if it is asked for, as it takes hours.
    """
    if as_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, EngineConfig)

    def run_kind(args: argparse.Namespace) -> int:
        config = from_args(EngineConfig, args)
        asked_for = config.device != "auto" or getattr(args, "simulate", False)
        if runs_on_cpu and not asked_for and (reason := cuda_unavailable()):
            raise InputError(f"no GPU: {reason} On the CPU with --device cpu and a small --model")
        run(args, config)
        return 0

    # No step that is measured waits for a kernel.
    parser.set_defaults(
        run=run_kind, model="llama-3.2-1b", load_format="dummy", wait_for_kernels=True
    )
