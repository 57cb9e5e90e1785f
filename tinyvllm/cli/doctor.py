"""`tinyvllm doctor`: check driver, GPU, compiler and cache."""

from __future__ import annotations

import argparse

from tinyvllm.cli.options import Commands


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("doctor", help="check driver, GPU, compiler and cache")
    parser.add_argument("--device-index", type=int, default=0, help="which GPU to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Prints the checks of `tinyvllm doctor`."""
    from tinyvllm.doctor import run_doctor

    return 1 if run_doctor(args.device_index, as_json=args.json) else 0
