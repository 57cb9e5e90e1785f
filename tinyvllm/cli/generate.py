"""`tinyvllm generate`: complete one prompt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import open_ahead
from tinyvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyvllm.driver.trace import Trace


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("generate", help="complete a prompt")
    parser.add_argument("prompt", help="text to complete")
    add_options(parser, EngineConfig, leave_out="seed")  # the request's own decides
    add_options(parser, SamplingParams)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run_generate, max_tokens=128, temperature=0.0)


def run_generate(args: argparse.Namespace, trace: Trace | None = None) -> int:
    """Streams the completion of a prompt, then says how fast it was on standard error."""
    start = time.perf_counter()
    params = from_args(SamplingParams, args)
    config = from_args(EngineConfig, args, leave_out="seed")
    if trace is None:  # a trace shows all calls, from the first on
        open_ahead(config.gpu_index, config.kernel_path)
    from tinyvllm.api.llm import LLM
    from tinyvllm.model.hub import default_model

    options = dataclasses.asdict(config)
    options["model"] = config.model or default_model()
    with LLM(**options, trace=trace) as llm:
        print(f"{llm.engine.model.where} on {llm.engine.backend.device_name}", file=sys.stderr)
        stream_completion(llm, args.prompt, params, start, as_json=args.json)
    return 0


def stream_completion(
    llm: Any, prompt: str, params: SamplingParams, start: float, *, as_json: bool
) -> None:
    """Prints text as it comes; `start` is when the command began (`time.perf_counter`).

    `as_json` prints one object when all has come: the texts and token ids of all n outputs.
    """
    begin = first = time.perf_counter()
    count = 0
    choices: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "finish_reason": None, "stop_reason": None}
        for _ in range(params.n)
    ]
    for output in llm.stream(prompt, params):
        if count == 0:
            first = time.perf_counter()
        for new in output.outputs:
            count += len(new.token_ids)
            choice = choices[new.index]
            choice["text"] += new.text
            choice["token_ids"] += new.token_ids
            choice |= {"finish_reason": new.finish_reason, "stop_reason": new.stop_reason}
            if not as_json:
                print(new.text, end="", flush=True)
    end = time.perf_counter()
    if as_json:
        prompt_ids = output.prompt_token_ids
        print(json.dumps({"prompt": prompt, "prompt_token_ids": prompt_ids, "outputs": choices}))
    else:
        print()
    prompt_len = len(output.prompt_token_ids)
    decode = f"{(count - 1) / (end - first):.1f} tokens/s decode, " if count > 1 else ""
    print(
        f"{prompt_len / (first - begin):.1f} tokens/s prompt, {decode}"
        f"first token {first - start:.2f} s after the start",
        file=sys.stderr,
    )
