"""The engine's loop: schedule a step, run it, take its tokens, report what is finished."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm.config import EngineConfig
from tinyvllm.engine.backend import open_backend
from tinyvllm.engine.batch import SCORE_ROWS, build_batch
from tinyvllm.engine.request import Request
from tinyvllm.engine.scheduler import ScheduledRow, ScheduledStep, Scheduler
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.model.hub import resolve_model
from tinyvllm.model.tokenizer import IncrementalDecoder
from tinyvllm.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

LOGPROB_OUTPUTS = ("target_logprob", "target_rank", "top_ids", "top_logprobs")


class LLMEngine:
    """Requests in, tokens out, one step at a time. Use `LLM` unless you need the steps.

    Raises InputError for options, files and requests that cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = resolve_model(config.model, config.load_format)
        self.tokenizer = self.model.tokenizer()
        self.backend = open_backend(config, self.model)
        self.scheduler = Scheduler(
            BlockManager(self.backend.memory.num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.backend.max_model_len,
            vocab_size=self.model.config.vocab_size,
        )
        self._decoders: dict[str, IncrementalDecoder] = {}  # of requests that stream

    def make_request(self, request_id: str, prompt: Any, params: SamplingParams) -> Request:
        """A checked request that is not queued yet; see `add_request`."""
        text, ids = self._tokenize(request_id, prompt)
        request = Request(request_id, ids, params, self.model.config.eos_token_ids, text)
        self.scheduler.validate(request)
        return request

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, stream: bool = False
    ) -> None:
        """Queues a prompt: text, or {"prompt_token_ids": [...]}.

        With `stream`, `step` reports the request after each token, with the new text alone.
        """
        self.enqueue(self.make_request(request_id, prompt, params), stream=stream)

    def enqueue(self, request: Request, *, stream: bool = False) -> None:
        """Queues what `make_request` returned."""
        self.scheduler.add(request)
        if stream:
            self._decoders[request.request_id] = IncrementalDecoder(
                self.tokenizer, request.prompt_token_ids
            )

    def abort_request(self, request_id: str) -> None:
        """Ends a request at once and frees its blocks; unknown ids are ignored."""
        self.scheduler.abort(request_id)
        self._decoders.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that finished and news of those that stream."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        tokens = self._run(step)
        ended = self.scheduler.update(step, tokens)
        outputs = [
            self._delta(row.request)
            for row in step.sampling_rows
            if row.request.request_id in self._decoders
        ]
        streamed = {output.request_id for output in outputs}
        return outputs + [self._final(r) for r in ended if r.request_id not in streamed]

    def close(self) -> None:
        """Frees the device. The engine cannot be used afterwards."""
        self.backend.close()

    def _tokenize(self, request_id: str, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            ids = prompt["prompt_token_ids"]
            if isinstance(ids, (list, tuple)):
                return None, list(ids)
        raise InputError(
            f"request {request_id!r}: a prompt is text or {{'prompt_token_ids': [ids]}}, "
            f"not {type(prompt).__name__}"
        )

    def _run(self, step: ScheduledStep) -> list[int]:
        """Runs the step's programs; log-probabilities are added to their requests here."""
        run = self.backend.executor.run
        batch = build_batch(step, self.config.seed)
        prefill = len(step.rows) > step.num_decodes
        result = run("prefill" if prefill else "decode", batch.dims, batch.inputs, ("tokens",))
        sampling = step.sampling_rows
        wanted = [r.request.params.logprobs for r in sampling]
        if any(n is not None for n in wanted):
            top = max(1, *(n or 0 for n in wanted))
            found = run("logprobs", {**batch.dims, "P": top}, {}, LOGPROB_OUTPUTS).get()
        self._score_prompts(step, batch.dims)
        tokens: list[int] = result.get()["tokens"].tolist()
        for i, (row, count) in enumerate(zip(sampling, wanted, strict=True)):
            if count is not None and not row.request.finished:
                entry = self._token_logprobs(found, i, tokens[i], count)
                row.request.logprobs.append(entry)
                row.request.cumulative_logprob += entry[tokens[i]].logprob
        return tokens

    def _score_prompts(self, step: ScheduledStep, dims: dict[str, int]) -> None:
        """Log-probabilities of prompt tokens, a bounded number of positions at a time."""
        rows: list[tuple[ScheduledRow, int, int]] = []  # row, index in the step, target
        offset = 0
        for row in step.rows:
            request = row.request
            if request.params.prompt_logprobs is not None:
                if not request.prompt_logprobs:
                    request.prompt_logprobs.append(None)  # nothing precedes the first token
                # Position p predicts prompt token p + 1; a preempted request has some already.
                first = max(row.start, len(request.prompt_logprobs) - 1)
                last = min(row.start + row.num_tokens, len(request.prompt_token_ids) - 1)
                rows += [
                    (row, offset + p - row.start, request.prompt_token_ids[p + 1])
                    for p in range(first, last)
                ]
            offset += row.num_tokens
        for start in range(0, len(rows), SCORE_ROWS):
            part = rows[start : start + SCORE_ROWS]
            counts = [r.request.params.prompt_logprobs or 0 for r, _, _ in part]
            inputs = {
                "score_index": np.array([index for _, index, _ in part], np.int32),
                "score_targets": np.array([target for _, _, target in part], np.int32),
            }
            sizes = {**dims, "N": len(part), "P": max(1, *counts)}
            found = self.backend.executor.run("score", sizes, inputs, LOGPROB_OUTPUTS).get()
            for i, (row, _, target) in enumerate(part):
                entry = self._token_logprobs(found, i, target, counts[i])
                row.request.prompt_logprobs.append(entry)

    def _token_logprobs(
        self, found: dict[str, np.ndarray], i: int, token: int, count: int
    ) -> TokenLogprobs:
        """The chosen token first, then the `count` most likely ones."""

        def entry(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self.tokenizer.decode([token], False))

        chosen, rank = float(found["target_logprob"][i]), int(found["target_rank"][i])
        result = {token: entry(token, chosen, rank)}
        for n in range(count):
            top = int(found["top_ids"][i, n])
            result.setdefault(top, entry(top, float(found["top_logprobs"][i, n]), n + 1))
        return result

    def _delta(self, request: Request) -> RequestOutput:
        """News of a request that streams: the text since the last time."""
        decoder = self._decoders[request.request_id]
        text = decoder.push([] if self._hides_last(request) else request.output_token_ids[-1:])
        if request.finished:
            text += decoder.flush()
            del self._decoders[request.request_id]
        return self._output(request, text)

    def _final(self, request: Request) -> RequestOutput:
        """A finished request with its whole text."""
        decoder = IncrementalDecoder(self.tokenizer, request.prompt_token_ids)
        text = decoder.push(self._shown(request)) + decoder.flush()
        return self._output(request, text)

    def _hides_last(self, request: Request) -> bool:
        """The token that stopped a request is among its ids but not in its text, as in vLLM."""
        return request.finish_reason == "stop"

    def _shown(self, request: Request) -> list[int]:
        ids = request.output_token_ids
        return ids[:-1] if self._hides_last(request) else ids

    def _output(self, request: Request, text: str) -> RequestOutput:
        params = request.params
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=list(request.output_token_ids),
            cumulative_logprob=request.cumulative_logprob if params.logprobs is not None else None,
            logprobs=list(request.logprobs) if params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            list(request.prompt_logprobs) if params.prompt_logprobs is not None else None,
            [completion],
            request.finished,
        )
