"""The subcommands of `tinyvllm bench` that measure steps of a model, and what these are made of."""

from __future__ import annotations

import argparse

from tinyvllm.cli.bench_options import PHASES, finish, pair
from tinyvllm.cli.options import Commands
from tinyvllm.config import EngineConfig
from tinyvllm.sampling_params import SAMPLERS
from tinyvllm.util import InputError


def add(kinds: Commands) -> None:
    """Adds them."""
    _add_latency(kinds)
    _add_kernels(kinds)
    _add_matmul(kinds)
    _add_attention(kinds)
    _add_host(kinds)
    _add_memory(kinds)


# The modules are imported when they run: they need more than the command line does.


def _add_latency(kinds: Commands) -> None:
    parser = kinds.add_parser("latency", help="time of a decode step next to its floor")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="sequences a step")
    parser.add_argument("--context", type=int, nargs="+", default=[256], help="tokens before it")
    parser.add_argument("--host", action="store_true", help="show the host's time per step too")
    finish(parser, run_latency, as_json=True)


def run_latency(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.latency import bench_latency

    bench_latency(config, args.batch, args.context, as_json=args.json, host=args.host)


def _add_kernels(kinds: Commands) -> None:
    parser = kinds.add_parser("kernels", help="time and floor of each op of a step")
    parser.add_argument("--phase", choices=PHASES, default="decode", help="which step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences in the step")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[256], help="tokens of each, with the new one"
    )
    parser.add_argument("--sampler", choices=SAMPLERS, default="plain", help="of the step")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all rows")
    parser.add_argument(
        "--rows",
        action="store_true",
        help="for each number of rows: the padded step's time over that of an exact graph",
    )
    parser.add_argument("--svg", metavar="FILE", help="write a roofline")
    finish(parser, run_kernels, as_json=True)


def run_kernels(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.kernels import bench_kernels

    bench_kernels(
        config,
        phase=args.phase,
        sampler=args.sampler,
        temperature=args.temperature,
        batches=args.batch,
        contexts=args.context,
        rows=args.rows,
        as_json=args.json,
        svg=args.svg,
    )


def _add_rival(parser: argparse.ArgumentParser, only: str = "") -> None:
    parser.add_argument(
        "--rival",
        metavar="FILE",
        help=f"in turns with the kernels of a Python file{only}: tests/bench/torch_rival.py has "
        "PyTorch's",
    )


def _add_matmul(kinds: Commands) -> None:
    parser = kinds.add_parser("matmul", help="products alone, next to their floor and to a rival")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192], help="rows of x")
    parser.add_argument(
        "--shapes",
        type=pair,
        nargs="+",
        metavar="NxK",
        default=[],
        help="of the weight (default: those of a layer)",
    )
    _add_rival(parser)
    finish(parser, run_matmul, as_json=True)


def run_matmul(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.matmul import bench_matmul

    bench_matmul(config, args.rows, args.shapes, rival=args.rival, as_json=args.json)


def _add_attention(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "attention", help="decode attention next to reads of its pages, or that of prompts"
    )
    parser.add_argument("--phase", choices=PHASES, default="decode", help="which attention")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences (default: 32, prefill: 1)")
    parser.add_argument(
        "--context", type=int, nargs="+", help="tokens (default: 2048 4096, prefill: 8192)"
    )
    _add_rival(parser, ", for prefill")
    finish(parser, run_attention, as_json=True)


def run_attention(args: argparse.Namespace, config: EngineConfig) -> None:
    if args.phase == "prefill":
        from tinyvllm.bench.attention_prefill import bench_attention_prefill

        batches, lengths = args.batch or [1], args.context or [8192]
        bench_attention_prefill(config, batches, lengths, rival=args.rival, as_json=args.json)
        return
    from tinyvllm.bench.attention import bench_attention

    if args.rival:
        raise InputError("--rival compares attention of prompts only: --phase prefill")
    batches, contexts = args.batch or [32], args.context or [2048, 4096]
    bench_attention(config, batches, contexts, as_json=args.json)


def _add_host(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "host", help="Python's time for a step, on a device that does nothing"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="sequences")
    finish(parser, run_host)


def run_host(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.host import bench_host

    bench_host(config, args.batch)


def _add_memory(kinds: Commands) -> None:
    parser = kinds.add_parser("memory", help="allocations, copies, and swapping beside a decode")
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="tokens"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode meanwhile")
    parser.add_argument("--context", type=int, default=256, help="tokens before a decode step")
    finish(parser, run_memory, as_json=True)


def run_memory(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.memory import bench_memory

    bench_memory(config, args.block_sizes, args.batch, args.context, as_json=args.json)
