"""`tinyvllm kernel`: one kernel's resources, machine code, correctness and time."""

from __future__ import annotations

import argparse

from tinyvllm.cli.bench_options import PHASES
from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.driver.devices import DEVICES
from tinyvllm.sampling_params import SAMPLERS


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("kernel", help="what a kernel uses, whether it is right, its time")
    parser.add_argument("name", help="part of the kernel's name or of its file's")
    parser.add_argument("--source", metavar="FILE", help="a changed copy of its file, to try")
    parser.add_argument("--phase", choices=PHASES, default="decode", help="of the step it runs in")
    parser.add_argument("--sampler", choices=SAMPLERS, default="plain", help="of that step")
    parser.add_argument("--batch", type=int, default=1, help="sequences in it")
    parser.add_argument("--context", type=int, default=256, help="tokens of each")
    parser.add_argument(
        "--arch", choices=list(DEVICES), default="sm_90a", help="to show the resources for"
    )
    parser.add_argument("--sass", action="store_true", help="print its machine code")
    add_options(parser, EngineConfig)
    parser.set_defaults(run=run_kernel, model="llama-3.2-1b", load_format="dummy")


def run_kernel(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 where a kernel is wrong."""
    from tinyvllm.bench.kernel import show_kernel

    right = show_kernel(
        from_args(EngineConfig, args),
        args.name,
        source=args.source,
        phase=args.phase,
        sampler=args.sampler,
        batch=args.batch,
        context=args.context,
        arch=args.arch,
        sass=args.sass,
    )
    return 0 if right else 1
