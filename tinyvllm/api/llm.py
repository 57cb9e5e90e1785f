"""Offline inference: prompts in, results out in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.outputs import RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import Closing, InputError

Prompt = str | dict[str, Any]


class LLM(Closing):
    """A model ready to generate. Options are those of `EngineConfig`, with vLLM's names.

    An unknown option is a TypeError that names it; a value out of range, a model that cannot be
    read or does not fit is an InputError. Close it, or use it as a context manager, to free the
    device.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig(model=model, **options))
        self._ids = itertools.count()
        # Outputs not yet handed out, by request: several streams may be read in turn.
        self._inbox: dict[str, list[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, each text or {"prompt_token_ids": [...]}; results in their order.

        `sampling_params` is one for all prompts, or one each. A bad prompt is an InputError
        before anything runs.
        """
        batch = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        params = _params_each(sampling_params, len(batch))
        requests = [
            self.engine.make_request(str(next(self._ids)), prompt, p)
            for prompt, p in zip(batch, params, strict=True)
        ]
        try:
            for request in requests:
                self._begin(request)
            return [self._wait(request.request_id)[0] for request in requests]
        finally:
            for request in requests:  # after an error or Ctrl-C nothing of them may go on
                self._end(request)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding after each token; `outputs[0].text` is the new text.

        Text is held back while a character is incomplete. Leaving the loop ends the request.
        """
        request = self.engine.make_request(
            str(next(self._ids)), prompt, sampling_params or SamplingParams()
        )
        self._begin(request, stream=True)
        try:
            finished = False
            while not finished:
                for output in self._wait(request.request_id):
                    finished = output.finished
                    yield output
        finally:
            self._end(request)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Frees the device; the object cannot be used afterwards."""
        self.engine.close()

    def _begin(self, request: Request, *, stream: bool = False) -> None:
        self.engine.enqueue(request, stream=stream)
        self._inbox[request.request_id] = []

    def _wait(self, request_id: str) -> list[RequestOutput]:
        """Steps the engine until there is news of a request, and takes it."""
        while not self._inbox[request_id]:
            for output in self.engine.step():
                self._inbox[output.request_id].append(output)
        news, self._inbox[request_id] = self._inbox[request_id], []
        return news

    def _end(self, request: Request) -> None:
        self.engine.abort_request(request.request_id)
        self._inbox.pop(request.request_id, None)


def _params_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling_params for {count} prompts: give one or as many")
    return params
