"""Requests to the engine on a caller's behalf: counted, joined, several prompts at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tinyvllm.outputs import CompletionOutput, RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.serve.state import ServerState

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


async def generate(
    state: ServerState,
    prompts: Sequence[Any],
    params: SamplingParams,
    request_id: str,
    priority: int,
) -> Outputs:
    """What is new of the prompts as it comes, each with the index of its prompt.

    Each prompt is text or {"prompt_token_ids": [...]}. Closing the generator ends all requests.
    """
    with state.admitted(params, len(prompts)):
        if len(prompts) == 1:
            async with aclosing(_one(state, prompts[0], params, request_id, priority)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

        async def follow(index: int, prompt: Any) -> None:
            name = f"{request_id}-{index}"
            async with aclosing(_one(state, prompt, params, name, priority)) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))

        tasks = [asyncio.create_task(follow(i, prompt)) for i, prompt in enumerate(prompts)]
        for task in tasks:
            task.add_done_callback(lambda task: queue.put_nowait(_end_of(task)))
        try:
            running = len(tasks)
            while running:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    running -= 1
                else:
                    yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _end_of(task: asyncio.Task[None]) -> Exception | None:
    error = None if task.cancelled() else task.exception()
    assert error is None or isinstance(error, Exception), error
    return error


async def _one(
    state: ServerState, prompt: Any, params: SamplingParams, request_id: str, priority: int
) -> AsyncGenerator[RequestOutput, None]:
    """One prompt, with its numbers counted."""
    metrics = state.metrics.follow(params)
    source = state.llm.generate(prompt, params, request_id, priority=priority)
    async with aclosing(source) as outputs:
        try:
            async for output in outputs:
                metrics.add(output)
                yield output
        finally:
            metrics.close()


async def collect(outputs: Outputs, num_prompts: int) -> list[RequestOutput]:
    """The whole output of each prompt."""
    whole: list[dict[int, CompletionOutput]] = [{} for _ in range(num_prompts)]
    last: list[RequestOutput | None] = [None] * num_prompts
    async with aclosing(outputs) as news:
        async for index, output in news:
            last[index] = output
            for new in output.outputs:
                known = whole[index].setdefault(new.index, new)
                if known is not new:
                    _join(known, new)
    results = []
    for result, sequences in zip(last, whole, strict=True):
        assert result is not None
        result.outputs = [sequences[index] for index in sorted(sequences)]
        results.append(result)
    return results


def _join(known: CompletionOutput, new: CompletionOutput) -> None:
    known.text += new.text
    known.token_ids += new.token_ids
    known.cumulative_logprob = new.cumulative_logprob
    if known.logprobs is not None and new.logprobs is not None:
        known.logprobs += new.logprobs
    known.finish_reason, known.stop_reason = new.finish_reason, new.stop_reason


class Usage:
    """The numbers of tokens of a request: each prompt once, and all that was generated."""

    def __init__(self, num_prompts: int) -> None:
        self._prompts = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._generated = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Counts in what is new of a prompt."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens
        self._generated += sum(len(o.token_ids) for o in output.outputs)

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(self._prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._generated,
            "total_tokens": prompt + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
