"""The entry point: parses the command line, runs a subcommand, turns errors into exit codes."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

import tinyvllm
from tinyvllm.cli.options import Parser
from tinyvllm.driver.calls import CompileError, CudaError
from tinyvllm.memory.pool import OutOfMemoryError
from tinyvllm.util import InputError, log_start

# In the order of the help; each is a module with `add`.
COMMANDS = ("generate", "chat", "serve", "top", "plan", "trace", "bench", "kernel", "doctor")
USER_ERRORS = (InputError, CudaError, CompileError, OutOfMemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 after an error, 2 for wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser("tinyvllm", description="Large language models on NVIDIA GPUs, without PyTorch")
    parser.add_argument("--version", action="version", version=f"tinyvllm {tinyvllm.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    # The others would be loaded for nothing. Unless the command comes first, or behind the option
    # that asks for nothing else, all are: for help and errors.
    wanted = next((arg for arg in argv if arg not in ("-v", "--verbose")), None)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        importlib.import_module(f"tinyvllm.cli.{name}").add(commands)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character
    logging.basicConfig(
        format="%(message)s", level=logging.INFO if args.verbose else logging.WARNING
    )
    log_start("interpreter and options")
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
