"""`tinyvllm trace`: every CUDA call of a command, and how long its kernels take."""

from __future__ import annotations

import argparse
import sys

from tinyvllm.cli import generate
from tinyvllm.cli.options import Commands, Parser

DEFAULT_FILES = {"text": "trace.txt", "jsonl": "trace.jsonl", "perfetto": "trace.json"}


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "trace",
        help="write every CUDA call of a command to a file",
        usage="tinyvllm trace [-o FILE] [--format FORMAT] -- generate ...",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default: trace.txt, .jsonl, .json")
    parser.add_argument(
        "--format",
        choices=list(DEFAULT_FILES),
        help="a listing to read, JSON lines, or a trace for ui.perfetto.dev (default: as the "
        "suffix of FILE says, else text)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="generate with its options")
    parser.set_defaults(run=run_trace)


def run_trace(args: argparse.Namespace) -> int:
    """Runs the command with a trace, then says where the trace is."""
    from tinyvllm.driver.trace import Trace

    inner = Parser("tinyvllm trace --")
    generate.add(inner.add_subparsers(required=True, metavar="COMMAND"))
    command = inner.parse_args(args.command[args.command[:1] == ["--"] :])
    output = args.output or DEFAULT_FILES[args.format or "text"]
    with Trace(output, args.format) as trace:
        status = generate.run_generate(command, trace)
    print(f"trace: {output}", file=sys.stderr)
    return status
