"""/v1/chat/completions: a conversation answered, at once or as a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinyvllm.outputs import CompletionOutput, RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.serve.connection import DONE, EventStream, event, while_connected
from tinyvllm.serve.errors import dump
from tinyvllm.serve.generation import Outputs, Usage, collect, generate
from tinyvllm.serve.logprobs import chat_logprobs, prompt_logprobs
from tinyvllm.serve.protocol import ChatCompletionRequest, ChatMessage
from tinyvllm.serve.state import ServerState
from tinyvllm.util import InputError

# What the renderer itself passes to a template, which a request may not replace.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


async def chat(state: ServerState, body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a request for chat completions."""
    job = _Job(state, body, state.check_model(body.model), _params(state, body))
    seconds = state.config.request_timeout
    outputs = job.run()
    if body.stream:
        return EventStream(job.events(outputs), seconds)
    return job.whole(await while_connected(request.receive, collect(outputs, 1), seconds))


async def render(
    state: ServerState,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    variables: dict[str, Any] | None,
) -> list[int]:
    """Token ids of a conversation, rendered with the model's template."""
    for name in variables or ():
        if name in _RESERVED:
            raise InputError(f"chat_template_kwargs: {name!r} is not for requests to set")
    plain = [message.model_dump(exclude_unset=True) for message in messages]

    def work() -> list[int]:
        text = state.chat_template.render(
            plain, add_generation_prompt=add_generation_prompt, **(variables or {})
        )
        return state.tokenizer.encode_chat(text)

    return await asyncio.to_thread(work)


@dataclass
class _Job:
    """One request and the form of its answer."""

    state: ServerState
    body: ChatCompletionRequest
    model: str
    params: SamplingParams
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def run(self) -> Outputs:
        """Renders the conversation, then generates."""
        body = self.body
        ids = await render(
            self.state, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
        prompt = {"prompt_token_ids": ids}
        outputs = generate(self.state, [prompt], self.params, self.id, body.priority)
        async with aclosing(outputs) as news:
            async for item in news:
                yield item

    def whole(self, results: list[RequestOutput]) -> Response:
        """The answer all at once."""
        (result,) = results
        usage = Usage(1)
        usage.add(0, result)
        choices = [
            self._choice(output, message={"role": "assistant", "content": output.text})
            for output in result.outputs
        ]
        value = self._object("chat.completion", choices) | {"usage": usage.body()}
        if self.body.prompt_logprobs is not None and result.prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        return Response(dump(value), media_type="application/json")

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The answer as it comes; each choice begins with its role."""
        usage, begun = Usage(1), set()
        numbers: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        async with aclosing(outputs) as news:
            async for _, result in news:
                usage.add(0, result)
                choices = []
                for output in result.outputs:
                    delta: dict[str, Any] = {"content": output.text} if output.text else {}
                    if output.index not in begun:
                        begun.add(output.index)
                        delta = {"role": "assistant", "content": output.text}
                    choice = self._choice(output, delta=delta)
                    if delta or choice["finish_reason"] or choice["logprobs"]:
                        choices.append(choice)
                if choices:
                    yield event(self._object("chat.completion.chunk", choices) | numbers)
        if self.body.wants_usage:
            yield event(self._object("chat.completion.chunk", []) | {"usage": usage.body()})
        yield DONE

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, output: CompletionOutput, **content: Any) -> dict[str, Any]:
        logprobs = None
        if output.logprobs:
            count = self.body.top_logprobs or 0
            logprobs = chat_logprobs(output.token_ids, output.logprobs, count)
        return {
            "index": output.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }


def _params(state: ServerState, body: ChatCompletionRequest) -> SamplingParams:
    return body.sampling_params(
        state.defaults, max_tokens=body.token_limit(), logprobs=body.num_logprobs()
    )
