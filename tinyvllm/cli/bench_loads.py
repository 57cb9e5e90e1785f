"""The subcommands of `tinyvllm bench` that measure whole loads, and starts."""

from __future__ import annotations

import argparse
from typing import Any

from tinyvllm.cli.bench_options import finish, pair
from tinyvllm.cli.options import Commands
from tinyvllm.config import EngineConfig, check_int

LOADS = ("nano-vllm", "uniform", "sharegpt", "long-prompts")


def add(kinds: Commands) -> None:
    """Adds them."""
    _add_startup(kinds)
    _add_load(kinds)
    _add_serve(kinds)
    _add_throughput(kinds)
    _add_prefill(kinds)
    _add_sweep(kinds)
    _add_preemption(kinds)


# The modules are imported when they run: they need more than the command line does.


def _add_startup(kinds: Commands) -> None:
    parser = kinds.add_parser("startup", help="process start to first token")
    parser.add_argument(
        "--runs", type=int, default=3, help="how many starts with a warm kernel cache"
    )
    finish(parser, run_startup, runs_on_cpu=True)


def run_startup(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.startup import bench_startup

    bench_startup(config, args.runs)


def _add_serve(kinds: Commands) -> None:
    parser = kinds.add_parser("serve", help="the server: step times, events, times to first token")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 32, 128], help="numbers of streams at once"
    )
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=2048, help="tokens of a stream")
    firsts: dict[str, Any] = {"type": int, "nargs": "+", "default": [1, 64]}
    parser.add_argument("--first-token-clients", help="the same for times to first token", **firsts)
    parser.add_argument("--first-token-requests", type=int, default=8, help="by each of these")
    parser.add_argument("--starts", type=int, default=2, help="how often to start the server")
    finish(parser, run_serve, as_json=True, runs_on_cpu=True)


def run_serve(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.serve import ServeLoad, bench_serve

    load = ServeLoad(
        clients=args.clients,
        prompt_len=args.prompt_len,
        max_tokens=args.output_len,
        first_token_clients=args.first_token_clients,
        first_token_requests=args.first_token_requests,
    )
    bench_serve(config, load, args.starts, as_json=args.json)


def _add_load(kinds: Commands) -> None:
    parser = kinds.add_parser("load", help="rate of loading safetensors onto the GPU")
    finish(parser, run_load, runs_on_cpu=True)


def run_load(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.load import bench_load

    bench_load(config)


def _add_throughput(kinds: Commands) -> None:
    parser = kinds.add_parser("throughput", help="whole loads, next to their floors")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=LOADS[:3], help="which loads to run"
    )
    parser.add_argument("--lengths", help="file with a request a line: length in, length out")
    parser.add_argument(
        "--vary-max-num-seqs", type=int, nargs="+", metavar="N", help="values to compare"
    )
    parser.add_argument(
        "--vary-max-num-batched-tokens", type=int, nargs="+", metavar="N", help="values to compare"
    )
    parser.add_argument(
        "--runs", type=int, default=2, help="runs of each; the first captures CUDA graphs"
    )
    finish(parser, run_throughput, as_json=True)


def run_throughput(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.lengths import read_lengths
    from tinyvllm.bench.loads import of_lengths
    from tinyvllm.bench.throughput import Setting, bench_throughput, make_loads

    if args.lengths is None:
        loads = make_loads(config, args.loads, config.seed)
    else:
        from tinyvllm.model.hub import resolve_model

        model = resolve_model(config.model, config.load_format, config.revision)
        lengths = read_lengths(args.lengths)
        loads = [of_lengths(args.lengths, lengths, model.config.vocab_size, config.seed)]
    settings = [
        Setting(seqs, tokens)
        for seqs in args.vary_max_num_seqs or [config.max_num_seqs]
        for tokens in args.vary_max_num_batched_tokens or [config.max_num_batched_tokens]
    ]
    bench_throughput(config, loads, settings, runs=args.runs, as_json=args.json)


def _add_prefill(kinds: Commands) -> None:
    parser = kinds.add_parser("prefill", help="prompts alone, in chunks of several sizes")
    parser.add_argument(
        "--prompts",
        type=pair,
        nargs="+",
        default=[(1, 8192), (32, 1024)],
        help="how many, by the tokens of each (default: 1x8192 32x1024)",
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="tokens of a step"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs, of which the median counts")
    parser.add_argument("--ops", action="store_true", help="a table of the ops of a step too")
    finish(parser, run_prefill, as_json=True)


def run_prefill(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.prefill import bench_prefill

    bench_prefill(
        config, args.prompts, args.chunks, runs=args.runs, ops=args.ops, as_json=args.json
    )


def _add_sweep(kinds: Commands) -> None:
    parser = kinds.add_parser("sweep", help="which batch, block size and threshold suit a load")
    parser.add_argument(
        "--what",
        nargs="+",
        choices=("batch", "block-size", "threshold"),
        default=["batch", "block-size", "threshold"],
        help="what to vary",
    )
    parser.add_argument("--lengths", help="file with a request a line: length in, length out")
    parser.add_argument("--requests", type=int, default=512, help="how many, without --lengths")
    parser.add_argument(
        "--mean-input-len", type=float, default=161, help="mean length in, without --lengths"
    )
    parser.add_argument(
        "--mean-output-len", type=float, default=338, help="mean length out, without --lengths"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes (default: 1 to 256)")
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="tokens"
    )
    parser.add_argument("--thresholds", type=float, nargs="+", help="(default: 0.70 to 0.95)")
    parser.add_argument(
        "--share", type=float, default=0.25, help="of the KV blocks needed, to vary thresholds with"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="waste of block sizes alone: needs no device"
    )
    finish(parser, run_sweep, as_json=True, runs_on_cpu=True)


def run_sweep(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.lengths import exponential_lengths, read_lengths
    from tinyvllm.bench.sweep import BATCHES, THRESHOLDS, bench_sweep

    if args.lengths is None:
        check_int("requests", args.requests, 1, None)
        lengths = exponential_lengths(args.requests, args.mean_input_len, args.mean_output_len)
    else:
        lengths = read_lengths(args.lengths)
    bench_sweep(
        config,
        lengths,
        parts=args.what,
        batches=args.batches or BATCHES,
        block_sizes=args.block_sizes,
        thresholds=args.thresholds or THRESHOLDS,
        share=args.share,
        simulate=args.simulate,
        as_json=args.json,
    )


def _add_preemption(kinds: Commands) -> None:
    parser = kinds.add_parser("preemption", help="swapping against recomputing, with few KV blocks")
    parser.add_argument("--sequences", type=int, default=256, help="requests, queued at once")
    parser.add_argument("--input-len", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=512, help="tokens of each output")
    parser.add_argument("--share", type=float, default=0.25, help="of the KV blocks needed")
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="tokens"
    )
    finish(parser, run_preemption, as_json=True, runs_on_cpu=True)


def run_preemption(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.preemption import bench_preemption

    bench_preemption(
        config,
        args.block_sizes,
        sequences=args.sequences,
        input_len=args.input_len,
        output_len=args.output_len,
        share=args.share,
        runs=args.runs,
        as_json=args.json,
    )
