"""`tinyvllm bench`: the subcommands that measure."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.sampling_params import SAMPLERS

PHASES = ("decode", "prefill")
LOADS = ("nano-vllm", "uniform", "sharegpt", "long-prompts")


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

    kernels = kinds.add_parser("kernels", help="time and floor of each op of a step")
    kernels.add_argument("--phase", choices=PHASES, default="decode", help="which step")
    kernels.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences in the step")
    kernels.add_argument(
        "--context", type=int, nargs="+", default=[256], help="tokens of each, with the new one"
    )
    kernels.add_argument("--sampler", choices=SAMPLERS, default="plain", help="of the step")
    kernels.add_argument("--temperature", type=float, default=0.0, help="of all rows")
    kernels.add_argument(
        "--rows",
        action="store_true",
        help="for each number of rows: the padded step's time over that of an exact graph",
    )
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    kernels.add_argument("--svg", metavar="FILE", help="write a roofline")
    _finish(kernels, run_kernels)

    attention = kinds.add_parser("attention", help="decode attention next to reads of its pages")
    attention.add_argument("--batch", type=int, nargs="+", default=[32], help="sequences")
    attention.add_argument("--context", type=int, nargs="+", default=[2048, 4096], help="tokens")
    attention.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(attention, run_attention)

    host = kinds.add_parser("host", help="Python's time for a step, on a device that does nothing")
    host.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="sequences")
    _finish(host, run_host)

    startup = kinds.add_parser("startup", help="process start to first token")
    startup.add_argument("--runs", type=int, default=3, help="starts with a warm kernel cache")
    _finish(startup, run_startup)

    serve = kinds.add_parser("serve", help="the server: step times, events, times to first token")
    serve.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128], help="streams")
    serve.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt")
    serve.add_argument("--output-len", type=int, default=2048, help="tokens of a stream")
    firsts: dict[str, Any] = {"type": int, "nargs": "+", "default": [1, 64]}
    serve.add_argument("--first-token-clients", help="for time to first token", **firsts)
    serve.add_argument("--first-token-requests", type=int, default=8, help="of each client")
    serve.add_argument("--starts", type=int, default=2, help="how often to start the server")
    serve.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(serve, run_serve)

    _finish(kinds.add_parser("load", help="rate of loading safetensors onto the GPU"), run_load)
    _add_throughput(kinds)
    _add_prefill(kinds)
    _add_sweep(kinds)
    _add_preemption(kinds)

    memory = kinds.add_parser("memory", help="allocations, copies, and swapping beside a decode")
    memory.add_argument(
        "--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="tokens"
    )
    memory.add_argument("--batch", type=int, default=32, help="sequences that decode meanwhile")
    memory.add_argument("--context", type=int, default=256, help="tokens before a decode step")
    memory.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(memory, run_memory)


def _add_throughput(kinds: Commands) -> None:
    parser = kinds.add_parser("throughput", help="whole loads, next to their floors")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=LOADS[:3], help="(default: %(default)s)"
    )
    parser.add_argument("--lengths", help="file with a request a line: length in, length out")
    parser.add_argument(
        "--vary-max-num-seqs", type=int, nargs="+", metavar="N", help="values to compare"
    )
    parser.add_argument(
        "--vary-max-num-batched-tokens", type=int, nargs="+", metavar="N", help="values to compare"
    )
    parser.add_argument("--runs", type=int, default=2, help="the first one captures CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(parser, run_throughput)


def _add_prefill(kinds: Commands) -> None:
    parser = kinds.add_parser("prefill", help="prompts alone, in chunks of several sizes")
    parser.add_argument(
        "--prompts", type=_shape, nargs="+", default=[(1, 8192), (32, 1024)], help="e.g. 32x1024"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="tokens of a step"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs, of which the median counts")
    parser.add_argument("--ops", action="store_true", help="a table of the ops of a step too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(parser, run_prefill)


def _shape(text: str) -> tuple[int, int]:
    """How many prompts, and of how many tokens each."""
    prompts, _, length = text.partition("x")
    return int(prompts), int(length)


def _add_sweep(kinds: Commands) -> None:
    sweep = kinds.add_parser("sweep", help="which batch, block size and threshold suit a load")
    sweep.add_argument(
        "--what",
        nargs="+",
        choices=("batch", "block-size", "threshold"),
        default=["batch", "block-size", "threshold"],
        help="what to vary",
    )
    sweep.add_argument("--lengths", help="file with a request a line: length in, length out")
    sweep.add_argument("--requests", type=int, default=512, help="how many, without --lengths")
    sweep.add_argument(
        "--mean-input-len", type=float, default=161, help="mean length in, without --lengths"
    )
    sweep.add_argument(
        "--mean-output-len", type=float, default=338, help="mean length out, without --lengths"
    )
    sweep.add_argument("--batches", type=int, nargs="+", help="batch sizes (default: 1 to 256)")
    sweep.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="tokens")
    sweep.add_argument("--thresholds", type=float, nargs="+", help="(default: 0.70 to 0.95)")
    sweep.add_argument(
        "--share", type=float, default=0.25, help="of the KV blocks needed, to vary thresholds with"
    )
    sweep.add_argument(
        "--simulate", action="store_true", help="waste of block sizes alone: needs no device"
    )
    sweep.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(sweep, run_sweep)


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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _finish(parser, run_preemption)


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


def run_attention(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.attention import bench_attention

    bench_attention(config, args.batch, args.context, as_json=args.json)


def run_host(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.host import bench_host

    bench_host(config, args.batch)


def run_startup(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.startup import bench_startup

    bench_startup(config, args.runs)


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


def run_load(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.load import bench_load

    bench_load(config)


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


def run_prefill(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.prefill import bench_prefill

    bench_prefill(
        config, args.prompts, args.chunks, runs=args.runs, ops=args.ops, as_json=args.json
    )


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


def run_memory(args: argparse.Namespace, config: EngineConfig) -> None:
    from tinyvllm.bench.memory import bench_memory

    bench_memory(config, args.block_sizes, args.batch, args.context, as_json=args.json)
