"""The `tinyvllm` command; its options are generated from the configuration classes."""

from __future__ import annotations

import argparse
import dataclasses
import io
import logging
import os
import sys
import time
import typing
from collections.abc import Sequence
from typing import Any

import tinyvllm
from tinyvllm.config import EngineConfig
from tinyvllm.driver.calls import CompileError, CudaError
from tinyvllm.memory.pool import OutOfMemoryError
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

USER_ERRORS = (InputError, CudaError, CompileError, OutOfMemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 after an error, 2 for wrong usage."""
    parser = argparse.ArgumentParser("tinyvllm", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tinyvllm {tinyvllm.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete a prompt")
    generate.add_argument("prompt")
    add_options(generate, EngineConfig, leave_out="seed")  # the request's own decides
    add_options(generate, SamplingParams)
    generate.set_defaults(run=run_generate, max_tokens=128, temperature=0.0)

    doctor = commands.add_parser("doctor", help="check driver, GPU, compiler and cache")
    doctor.add_argument("--device-index", type=int, default=0, help="which GPU to check")
    doctor.set_defaults(run=run_doctor)

    bench = commands.add_parser("bench", help="measure, with random weights by default")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    latency = kinds.add_parser("latency", help="time of a decode step next to its floor")
    latency.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="sequences a step")
    latency.add_argument("--context", type=int, nargs="+", default=[256], help="tokens before it")
    latency.add_argument("--json", action="store_true", help="print one JSON object")
    latency.add_argument("--host", action="store_true", help="show the host's time per step too")
    host = kinds.add_parser("host", help="Python's time for a step, on a device that does nothing")
    host.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="sequences")
    startup = kinds.add_parser("startup", help="process start to first token")
    startup.add_argument("--runs", type=int, default=3, help="starts with a warm kernel cache")
    load = kinds.add_parser("load", help="rate of loading safetensors onto the GPU")
    for kind in (latency, host, startup, load):
        add_options(kind, EngineConfig)
        kind.set_defaults(run=run_bench, model="llama-3.2-1b", load_format="dummy")
    latency.set_defaults(what="latency")
    host.set_defaults(what="host")
    startup.set_defaults(what="startup")
    load.set_defaults(what="load")

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


def add_options(
    parser: argparse.ArgumentParser, config: type[Any], leave_out: str | None = None
) -> None:
    """Adds an option for each field of a dataclass: `max_model_len` becomes `--max-model-len`."""
    group = parser.add_argument_group(config.__name__)
    types = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name == leave_out or not field.metadata["cli"]:
            continue
        hint = types[field.name]
        options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        kinds = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
        sequences = [t for t in (hint, *kinds) if typing.get_origin(t) is Sequence]
        if kinds == [bool]:
            options["action"] = argparse.BooleanOptionalAction
        elif sequences:
            options |= {"type": typing.get_args(sequences[0])[0], "action": "append"}
            options |= {"default": None, "help": f"{options['help']} (may be repeated)"}
        else:
            options |= {"type": kinds[0], "choices": field.metadata["choices"]}
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def from_args(config: type[Any], args: argparse.Namespace, leave_out: str | None = None) -> Any:
    """The dataclass that `add_options` made options for."""
    values = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(config)
        if f.metadata["cli"] and f.name != leave_out
    }
    return config(**{name: value for name, value in values.items() if value is not None})


def run_generate(args: argparse.Namespace) -> int:
    """Streams the completion of a prompt, then says how fast it was on standard error."""
    from tinyvllm.api.llm import LLM
    from tinyvllm.model.hub import default_model

    start = time.perf_counter()
    args.model = args.model or default_model()
    params = from_args(SamplingParams, args)
    config = from_args(EngineConfig, args, leave_out="seed")
    with LLM(**dataclasses.asdict(config)) as llm:
        print(f"{llm.engine.model.where} on {llm.engine.backend.device_name}", file=sys.stderr)
        stream_completion(llm, args.prompt, params, start)
    return 0


def stream_completion(llm: Any, prompt: str, params: SamplingParams, start: float) -> None:
    """Prints text as it comes; `start` is when the command began (`time.perf_counter`)."""
    begin = first = time.perf_counter()
    count = 0
    for output in llm.stream(prompt, params):
        if count == 0:
            first = time.perf_counter()
        count += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
    end = time.perf_counter()
    print()
    prompt_len = len(output.prompt_token_ids)
    decode = f"{(count - 1) / (end - first):.1f} tokens/s decode, " if count > 1 else ""
    print(
        f"{prompt_len / (first - begin):.1f} tokens/s prompt, {decode}"
        f"first token {first - start:.2f} s after the start",
        file=sys.stderr,
    )


def run_bench(args: argparse.Namespace) -> int:
    """Runs one of the benchmarks."""
    from tinyvllm import bench

    config = from_args(EngineConfig, args)
    if args.what == "latency":
        bench.bench_latency(config, args.batch, args.context, as_json=args.json, host=args.host)
    elif args.what == "host":
        bench.bench_host(config, args.batch)
    elif args.what == "startup":
        bench.bench_startup(config, args.runs)
    else:
        bench.bench_load(config)
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    """Prints the checks of `tinyvllm doctor`."""
    from tinyvllm.doctor import run_doctor

    return 1 if run_doctor(args.device_index) else 0
