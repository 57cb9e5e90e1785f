"""`tinyvllm generate`: complete one prompt."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyvllm.driver.trace import Trace


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("generate", help="complete a prompt")
    parser.add_argument("prompt")
    add_options(parser, EngineConfig, leave_out="seed")  # the request's own decides
    add_options(parser, SamplingParams)
    parser.set_defaults(run=run_generate, max_tokens=128, temperature=0.0)


def run_generate(args: argparse.Namespace, trace: Trace | None = None) -> int:
    """Streams the completion of a prompt, then says how fast it was on standard error."""
    from tinyvllm.api.llm import LLM
    from tinyvllm.model.hub import default_model

    start = time.perf_counter()
    args.model = args.model or default_model()
    params = from_args(SamplingParams, args)
    config = from_args(EngineConfig, args, leave_out="seed")
    with LLM(**dataclasses.asdict(config), trace=trace) as llm:
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
