"""`tinyvllm bench`: the subcommands that measure."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig


def add(commands: Commands) -> None:
    """Adds the subcommand with one of its own for each benchmark."""
    bench = commands.add_parser("bench", help="measure, with random weights by default")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    latency = kinds.add_parser("latency", help="time of a decode step next to its floor")
    latency.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="sequences a step")
    latency.add_argument("--context", type=int, nargs="+", default=[256], help="tokens before it")
    latency.add_argument("--json", action="store_true", help="print one JSON object")
    latency.add_argument("--host", action="store_true", help="show the host's time per step too")
    _finish(latency, run_latency)

    host = kinds.add_parser("host", help="Python's time for a step, on a device that does nothing")
    host.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="sequences")
    _finish(host, run_host)

    startup = kinds.add_parser("startup", help="process start to first token")
    startup.add_argument("--runs", type=int, default=3, help="starts with a warm kernel cache")
    _finish(startup, run_startup)

    _finish(kinds.add_parser("load", help="rate of loading safetensors onto the GPU"), run_load)


def _finish(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, EngineConfig], None]
) -> None:
    """Adds the engine's options, and what `main` calls."""
    add_options(parser, EngineConfig)

    def run_kind(args: argparse.Namespace) -> int:
        run(args, from_args(EngineConfig, args))
        return 0

    parser.set_defaults(run=run_kind, model="llama-3.2-1b", load_format="dummy")


# The modules are imported when they run: they need more than the command line does.


def run_latency(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.latency import bench_latency

    bench_latency(config, args.batch, args.context, as_json=args.json, host=args.host)


def run_host(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.host import bench_host

    bench_host(config, args.batch)


def run_startup(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.startup import bench_startup

    bench_startup(config, args.runs)


def run_load(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.load import bench_load

    bench_load(config)
