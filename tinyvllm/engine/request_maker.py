"""Makes checked sequences of what callers ask for: a prompt and its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyvllm.engine.prompt import tokenize
from tinyvllm.engine.request import Request
from tinyvllm.engine.row_lists import row_lists
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.sampling_params import SAMPLERS, SamplingParams, bad_word_ids


class RequestMaker:
    """Checks against the limits of a model and a scheduler, and queues nothing."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, scheduler: Scheduler) -> None:
        self._tokenizer, self._model, self._scheduler = tokenizer, model, scheduler

    def make(
        self, request_id: str, prompt: Any, params: SamplingParams, priority: int
    ) -> list[Request]:
        """The checked sequences of a request, params.n of them. InputError for what cannot run."""
        text, ids = tokenize(self._tokenizer, request_id, prompt)
        vocab_size = self._model.vocab_size
        words = bad_word_ids(params.bad_words, lambda word: self._tokenizer.encode(word, False))
        requests: list[Request] = []
        for index in range(params.n):
            if index == 1:  # the first one scores the prompt for all
                params = replace(params, prompt_logprobs=None)
            request = Request(
                request_id if index == 0 else f"{request_id}.{index}",
                ids,
                params,
                self._model.eos_token_ids,
                text,
                priority=priority,
                parent=requests[0] if requests else None,
                index=index,
            )
            self._scheduler.validate(request)
            if SAMPLERS[request.sampler] == "adjust":
                request.row_lists = row_lists(
                    params,
                    num_prompt=len(ids),
                    stop_ids=request.stop_set,
                    bad_words=words,
                    vocab_size=vocab_size,
                )
            requests.append(request)
        return requests
