"""A request as its caller follows it: rows from the engine in, outputs with text out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tinyvllm.api.wire import Add, Head, Row
from tinyvllm.engine.detokenizer import Detokenizer
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.outputs import CompletionOutput, RequestOutput
from tinyvllm.sampling_params import SamplingParams


class RequestStream:
    """Gathers what comes in until the caller takes it, so that a slow caller gets more at once.

    The text is made here, when it is taken, and the engine has nothing to do with it: many tokens
    at once cost little more than one. Only where stop strings end a request does the engine make
    it.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        prompt: tuple[str | None, list[int]],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.number = number
        self.finished = False  # all that will come has come
        self._request_id = request_id
        self._prompt, self._prompt_ids = prompt
        self._params = params
        self._detokenizers: list[Detokenizer] = []
        if params.detokenize and not params.stop:
            self._detokenizers = [
                Detokenizer(tokenizer, self._prompt_ids, params) for _ in range(params.n)
            ]
        self._head = Head(number)
        self._pending: dict[int, CompletionOutput] = {}
        self._num_running = params.n
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def command(self, priority: int, stream: bool) -> Add:
        """What begins the request in the engine."""
        params = replace(self._params, detokenize=False) if self._detokenizers else self._params
        return Add(self.number, self._request_id, self._prompt_ids, params, priority, stream)

    def begin(self, head: Head) -> None:
        """Takes in what comes once."""
        self._head = head

    def add(self, row: Row) -> None:
        """Takes in what is new of one sequence."""
        _, index, token_ids, text, cumulative, logprobs, finish_reason, stop_reason = row
        output = self._pending.get(index)
        if output is None:
            self._pending[index] = CompletionOutput(
                index, text, token_ids, cumulative, logprobs, finish_reason, stop_reason
            )
        else:
            output.token_ids += token_ids
            output.text += text
            output.cumulative_logprob = cumulative
            if output.logprobs is not None and logprobs is not None:
                output.logprobs += logprobs
            output.finish_reason, output.stop_reason = finish_reason, stop_reason
        if finish_reason is not None:
            self._num_running -= 1
            self.finished = self._num_running == 0
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which `take` raises."""
        self._error, self.finished = error, True
        self._changed.set()

    async def take(self) -> RequestOutput:
        """Waits for news and returns all there are: text, token ids and logprobs only new ones."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        outputs = sorted(self._pending.values(), key=lambda output: output.index)
        self._pending = {}
        for output in outputs if self._detokenizers else ():
            text = self._detokenizers[output.index].push(output.token_ids, output.finish_reason)
            output.text = text
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_ids,
            self._head.prompt_logprobs,
            outputs,
            self.finished,
            self._head.num_cached_tokens,
            self._head.queue_seconds,
        )
