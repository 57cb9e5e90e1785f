"""The entry point: parses the command line, runs a subcommand, turns errors into exit codes."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence

import tinyvllm
from tinyvllm.cli import bench, chat, doctor, generate, kernel, plan, serve, top, trace
from tinyvllm.cli.options import Parser
from tinyvllm.driver.calls import CompileError, CudaError
from tinyvllm.memory.pool import OutOfMemoryError
from tinyvllm.util import InputError

USER_ERRORS = (InputError, CudaError, CompileError, OutOfMemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 after an error, 2 for wrong usage."""
    parser = Parser("tinyvllm", description="Large language models on NVIDIA GPUs, without PyTorch")
    parser.add_argument("--version", action="version", version=f"tinyvllm {tinyvllm.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for command in (generate, chat, serve, top, plan, trace, bench, kernel, doctor):
        command.add(commands)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character
    logging.basicConfig(
        format="%(message)s", level=logging.INFO if args.verbose else logging.WARNING
    )
    try:
        return int(args.run(args))
    except USER_ERRORS as error:
        print(f"tinyvllm: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe went away. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk behind standard output, for example
        print(f"tinyvllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
