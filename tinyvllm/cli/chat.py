"""`tinyvllm chat`: a conversation in the terminal, or over pipes, a line a turn."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from tinyvllm.api.interrupt import deferred_interrupt
from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import open_ahead
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"
TEMPERATURE = 0.7  # where neither a person nor the model's makers say another


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("chat", help="talk with a model", description=HELP)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--system", help="a system message that stands before the conversation")
    parser.add_argument("--json", action="store_true", help="print each answer as a JSON object")
    add_options(parser, EngineConfig, leave_out="seed")  # the request's own decides
    add_options(parser, SamplingParams)
    # None: not given, so that the model's own defaults are known from what a person wants.
    parser.set_defaults(run=run_chat, **{f.name: None for f in dataclasses.fields(SamplingParams)})


def run_chat(args: argparse.Namespace) -> int:
    """Reads lines and answers them until the input ends."""
    if args.model_tag and args.model:
        raise InputError(f"MODEL={args.model_tag} and --model={args.model}: give one of them")
    args.model = args.model_tag or args.model
    config = from_args(EngineConfig, args, leave_out="seed")
    open_ahead(config.gpu_index, config.kernel_path)
    from tinyvllm.api.llm import LLM
    from tinyvllm.model.chat import require_jinja
    from tinyvllm.model.hub import default_model

    require_jinja()  # before the model is loaded
    options = dataclasses.asdict(config)
    options["model"] = config.model or default_model()
    with LLM(**options) as llm:
        print(f"{llm.engine.model.where} on {llm.engine.backend.device_name}", file=sys.stderr)
        params = _params(llm.engine.model.generation_defaults, args)
        conversation = Conversation(llm, params, args.system)
        llm.engine.chat_template  # noqa: B018 - a model without one is an error before any talk
        _talk(conversation, as_json=args.json)
    return 0


def _params(defaults: dict[str, Any], args: argparse.Namespace) -> SamplingParams:
    """The options that were given, over those that the model's makers recommend."""
    fields = [f for f in dataclasses.fields(SamplingParams) if f.metadata["cli"]]
    given = {f.name: getattr(args, f.name) for f in fields if getattr(args, f.name) is not None}
    params = SamplingParams(**{"temperature": TEMPERATURE, "max_tokens": None, **defaults, **given})
    if params.n != 1:
        raise InputError(f"n={params.n}: a conversation goes one way")
    return params


class Conversation:
    """Messages so far, and the model that answers them."""

    def __init__(self, llm: Any, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.finish_reason: str | None = None  # of the last answer
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        """The answer to a message, piece by piece, until it ends or Ctrl-C is pressed.

        What has been said by then stays in the conversation. InputError, and no change of the
        conversation, when it has become too long.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._llm.chat_prompt(messages)
        said = ""
        self.finish_reason = "abort"
        with deferred_interrupt() as interrupt:
            for output in self._llm.stream(prompt, self._params):
                said += output.outputs[0].text
                yield output.outputs[0].text
                self.finish_reason = output.outputs[0].finish_reason
                if interrupt.pending:
                    self.finish_reason = self.finish_reason or "abort"
                    break
        self._messages = [*messages, {"role": "assistant", "content": said}]


def _talk(conversation: Conversation, *, as_json: bool) -> None:
    """Takes turns. On a terminal it asks with a prompt; in a pipe it writes answers alone."""
    by_hand = sys.stdin.isatty() and sys.stdout.isatty()
    if by_hand:
        print(HELP, file=sys.stderr)
    while (line := _read_line(by_hand)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(f"{line.split()[0]}: no such command; {HELP}", file=sys.stderr)
        elif line:
            try:
                _print_answer(conversation, line, as_json=as_json)
            except InputError as error:  # it is too long by now, for example
                print(f"tinyvllm: {error}", file=sys.stderr)


def _print_answer(conversation: Conversation, line: str, *, as_json: bool) -> None:
    parts = []
    for text in conversation.answer(line):
        parts.append(text)
        if not as_json:
            print(text, end="", flush=True)
    if as_json:
        answer = {"role": "assistant", "content": "".join(parts)}
        print(json.dumps(answer | {"finish_reason": conversation.finish_reason}), flush=True)
    else:
        print(flush=True)


def _read_line(by_hand: bool) -> str | None:
    """The next line, stripped; None at the end of the input."""
    if not by_hand:
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401 - gives `input` a history

    # The marks tell readline that the colour takes no room.
    plain = "NO_COLOR" in os.environ
    try:
        return input("> " if plain else "\001\033[1;32m\002> \001\033[0m\002").strip()
    except KeyboardInterrupt:  # throws the line away
        print()
        return ""
    except EOFError:
        print()
        return None
