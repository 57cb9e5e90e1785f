"""/v1/completions: prompts continued, at once or as a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.serve.connection import DONE, EventStream, event, while_connected
from tinyvllm.serve.errors import dump
from tinyvllm.serve.generation import Outputs, Usage, collect, generate
from tinyvllm.serve.logprobs import completion_logprobs, prompt_logprobs
from tinyvllm.serve.protocol import CompletionRequest
from tinyvllm.serve.state import ServerState
from tinyvllm.util import InputError

DEFAULT_MAX_TOKENS = 16


async def complete(state: ServerState, body: CompletionRequest, request: Request) -> Response:
    """Answers a request for completions."""
    job = await _Job.begin(state, body)
    seconds = state.config.request_timeout
    outputs = generate(state, job.prompts, job.params, job.id, body.priority)
    if body.stream:
        return EventStream(job.events(outputs), seconds)
    work = collect(outputs, len(job.prompts))
    return job.whole(await while_connected(request.receive, work, seconds))


@dataclass
class _Job:
    """One request and the form of its answer."""

    state: ServerState
    body: CompletionRequest
    model: str
    prompts: list[Any]
    params: SamplingParams
    id: str
    created: int
    # Of each choice whose stream has begun: characters of the tokens sent with logprobs.
    _sent: dict[int, int] = field(default_factory=dict)

    @classmethod
    async def begin(cls, state: ServerState, body: CompletionRequest) -> _Job:
        model = state.check_model(body.model)
        if body.best_of not in (None, body.num_samples):
            raise InputError(f"best_of={body.best_of}: must be n={body.num_samples} or left out")
        prompts: list[Any] = body.prompts()
        if not body.add_special_tokens:
            encode = state.tokenizer.encode
            prompts = [
                await asyncio.to_thread(encode, p, False) if isinstance(p, str) else p
                for p in prompts
            ]
        prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        params = _params(state, body)
        return cls(
            state, body, model, prompts, params, f"cmpl-{uuid.uuid4().hex}", int(time.time())
        )

    @property
    def _only_echo(self) -> bool:
        return self.body.echo and self.body.max_tokens == 0

    def whole(self, results: list[RequestOutput]) -> Response:
        """The answer all at once."""
        usage, choices = Usage(len(results)), []
        for index, result in enumerate(results):
            for output in result.outputs:
                choices.append(self._choice(index, result, output))
            usage.add(index, result)
        return Response(dump(self._object(choices, usage.body())), media_type="application/json")

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        usage = Usage(len(self.prompts))
        numbers: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        async with aclosing(outputs) as news:
            async for index, result in news:
                choices = [self._choice(index, result, output) for output in result.outputs]
                usage.add(index, result)
                choices = [c for c in choices if c["text"] or c["finish_reason"] or c["logprobs"]]
                if choices:
                    yield event(self._object(choices) | numbers)
        if self.body.wants_usage:
            yield event(self._object([], usage.body()))
        yield DONE

    def _object(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        value = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return value if usage is None else value | {"usage": usage}

    def _choice(
        self, prompt_index: int, result: RequestOutput, output: CompletionOutput
    ) -> dict[str, Any]:
        """One choice, with what is new of it; the prompt comes before its first text."""
        index = prompt_index * self.params.n + output.index
        first = index not in self._sent
        offset = self._sent.get(index, 0)
        if self._only_echo:  # one token was generated, since fewer cannot be
            output.token_ids, output.text, output.logprobs = [], "", output.logprobs and []
            output.finish_reason = output.finish_reason and "length"
        token_ids, text = output.token_ids, output.text
        entries: list[TokenLogprobs | None] = [*(output.logprobs or ())]
        if self.body.echo and first:
            text = self._prompt_text(result) + text
            if self.body.logprobs is not None and result.prompt_logprobs is not None:
                token_ids = result.prompt_token_ids + token_ids
                entries = [*result.prompt_logprobs, *entries]
        logprobs = None
        if self.body.logprobs is not None and token_ids:
            logprobs = completion_logprobs(
                self.state.tokenizer, token_ids, entries, offset, self.body.logprobs
            )
            offset = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        self._sent[index] = offset
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.body.prompt_logprobs is not None and first and result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        return choice

    def _prompt_text(self, result: RequestOutput) -> str:
        if result.prompt is not None:
            return result.prompt
        skip = self.params.skip_special_tokens
        return self.state.tokenizer.decode(result.prompt_token_ids, skip)


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    defaults = dict(state.defaults)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        defaults["prompt_logprobs"] = body.logprobs
    return body.sampling_params(defaults, max_tokens=max_tokens, logprobs=body.logprobs)
