"""What all endpoints share: the engine, the options, who is being served, whether it goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tinyvllm.api.async_llm import AsyncLLM
from tinyvllm.api.wire import Ready
from tinyvllm.model.chat import ChatTemplate
from tinyvllm.model.hub import LocalModel
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.serve.config import ServeConfig
from tinyvllm.serve.errors import ApiError
from tinyvllm.serve.metrics import Metrics

_RETRY_S = 1
# Requests in the server beyond those that may generate: being read, checked or answered.
_EXTRA_IN_FLIGHT = 256


class ServerState:
    """One server's engine, options and books. Belongs to the event loop."""

    def __init__(
        self,
        llm: AsyncLLM,
        ready: Ready,
        model: LocalModel,
        tokenizer: Tokenizer,
        config: ServeConfig,
    ) -> None:
        self.llm = llm
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.max_model_len = ready.max_model_len
        self.device_name = ready.device_name
        self.names = config.served_model_name or (llm.config.model,)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0])
        self.stopping = False
        self.idle = asyncio.Event()  # nothing is in flight
        self.idle.set()
        self._num_in_flight = 0
        self._num_sequences = 0
        self._max_sequences = llm.config.max_num_seqs + config.max_waiting_requests

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's template; InputError if it has none."""
        return self.model.chat_template()

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling parameters that the model's makers recommend."""
        return self.model.generation_defaults

    def check_serving(self) -> None:
        """ApiError while the server stops, or when the engine has ended."""
        if self.llm.errored:
            raise ApiError(503, f"the engine has ended: {self.llm.dead_error}", code="engine_dead")
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=_RETRY_S)

    def check_model(self, name: str | None) -> str:
        """The model's name in answers; 404 for a name that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name or self.names[0]

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request in; 429 when there are too many of any kind."""
        if self._num_in_flight >= self._max_sequences + _EXTRA_IN_FLIGHT:
            raise self._busy()
        self._num_in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self.idle.set()

    @contextmanager
    def admitted(self, params: SamplingParams, num_prompts: int) -> Iterator[None]:
        """Counts the sequences of a request in; 429 when they would have to wait in too long a
        queue, 400 when they could never be let in."""
        count = num_prompts * params.n
        if count > self._max_sequences:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n={params.n}: at most {self._max_sequences} sequences",
            )
        if self._num_sequences + count > self._max_sequences:
            raise self._busy()
        self._num_sequences += count
        try:
            yield
        finally:
            self._num_sequences -= count

    def _busy(self) -> ApiError:
        waiting = self.config.max_waiting_requests
        return ApiError(
            429,
            f"too many requests wait already (max_waiting_requests={waiting}); try again later",
            code="queue_full",
            retry_after=_RETRY_S,
        )
