"""`tinyvllm bench`: the subcommands that measure."""

from __future__ import annotations

from tinyvllm.cli import bench_loads, bench_steps
from tinyvllm.cli.options import Commands


def add(commands: Commands) -> None:
    """Adds the subcommand with one of its own for each benchmark."""
    bench = commands.add_parser("bench", help="measure, with random weights by default")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    bench_steps.add(kinds)
    bench_loads.add(kinds)
