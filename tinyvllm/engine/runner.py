"""Runs scheduled steps on the executor: launches one, later takes its tokens."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from tinyvllm.driver.calls import phase
from tinyvllm.engine.backend import Backend
from tinyvllm.engine.batch import SCORE_ROWS, Batch, build_batch, take_excess_edits
from tinyvllm.engine.request import Request
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.ops.executor import Result
from tinyvllm.outputs import Logprob, TokenLogprobs
from tinyvllm.sampling_params import SAMPLERS

LOGPROB_OUTPUTS = ("target_logprob", "target_rank", "top_ids", "top_logprobs")


@dataclass(frozen=True)
class RunningStep:
    """A step that the device works on, with its outputs to come.

    launched: time.perf_counter() before its launch.
    """

    step: ScheduledStep
    launched: float
    tokens: Result
    logprobs: Result | None

    @property
    def phase(self) -> str:
        """Whether all rows decode, as the recorder of CUDA calls names it."""
        return "decode" if self.step.num_decodes == len(self.step.rows) else "prefill"

    def discard(self) -> None:
        """Gives up the outputs."""
        self.tokens.discard()
        if self.logprobs is not None:
            self.logprobs.discard()


class ModelRunner:
    """Turns scheduled steps into runs of the programs.

    `launch` never waits for the device, except where log-probabilities of a prompt are asked for:
    those may be more than the output ring holds.
    """

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, *, seed: int, enforce_eager: bool
    ) -> None:
        self._backend = backend
        self._limits = backend.limits
        self._tokenizer = tokenizer
        self._seed = seed
        self._graphs = not enforce_eager

    def launch(self, step: ScheduledStep) -> RunningStep:
        """Gives a step's work to the device."""
        executor = self._backend.executor
        launched = time.perf_counter()
        decode = step.num_decodes == len(step.rows)
        with phase("decode" if decode else "prefill"):
            for row in step.joins:
                for name, values in row.request.row_lists.items():
                    executor.write_row(name, row.slot, values)
            for edits in take_excess_edits(step, self._limits["B"]):
                executor.run("edits", {}, edits, ()).discard()
            batch = build_batch(step, self._seed, self._limits)
            sampler = max((row.request.sampler for row in step.rows), default=0)
            program = f"{'decode' if decode else 'prefill'}.{SAMPLERS[sampler]}"
            graph = decode and self._graphs
            with ExitStack() as results:  # given back after an error
                tokens = executor.run(program, batch.dims, batch.inputs, ("tokens",), graph)
                results.callback(tokens.discard)
                logprobs = self._launch_logprobs(step, batch)
                if logprobs is not None:
                    results.callback(logprobs.discard)
                if not decode:
                    self._score_prompts(step, batch)
                results.pop_all()
            return RunningStep(step, launched, tokens, logprobs)

    def finish(self, running: RunningStep) -> list[int]:
        """Waits for a step and returns the tokens of its sampling rows.

        Their log-probabilities are added to the requests that want them and have not ended.
        """
        sampling = running.step.sampling_rows
        with phase(running.phase):
            tokens: list[int] = running.tokens.get()["tokens"][: len(sampling)].tolist()
            found = None if running.logprobs is None else running.logprobs.get()
        if found is not None:
            for i, row in enumerate(sampling):
                request, count = row.request, row.request.params.logprobs
                if count is not None and not request.finished:
                    entry = self._token_logprobs(found, i, tokens[i], count)
                    request.logprobs.append(entry)
                    request.cumulative_logprob += entry[tokens[i]].logprob
        return tokens

    def _launch_logprobs(self, step: ScheduledStep, batch: Batch) -> Result | None:
        """Log-probabilities of the tokens that the step samples, if any row wants them."""
        counts = [row.request.params.logprobs for row in step.sampling_rows]
        wanted = [count for count in counts if count is not None]
        if not wanted:
            return None
        dims = {**batch.dims, "P": max(1, *wanted)}
        return self._backend.executor.run("logprobs", dims, {}, LOGPROB_OUTPUTS)

    def _score_prompts(self, step: ScheduledStep, batch: Batch) -> None:
        """Log-probabilities of prompt tokens, a bounded number of positions at a time."""
        wanted: list[tuple[Request, int, int]] = []  # request, index in the step, target
        offset = 0
        for row in step.rows:
            request = row.request
            if request.params.prompt_logprobs is not None:
                if not request.prompt_logprobs:
                    request.prompt_logprobs.append(None)  # nothing precedes the first token
                # Position p predicts prompt token p + 1; a preempted request has some already.
                first = max(row.start, len(request.prompt_logprobs) - 1)
                last = min(row.start + row.num_tokens, len(request.prompt_token_ids) - 1)
                wanted += [
                    (request, offset + p - row.start, request.prompt_token_ids[p + 1])
                    for p in range(first, last)
                ]
            offset += row.num_tokens
        for start in range(0, len(wanted), SCORE_ROWS):
            part = wanted[start : start + SCORE_ROWS]
            counts = [request.params.prompt_logprobs or 0 for request, _, _ in part]
            inputs = {
                "score_index": np.array([index for _, index, _ in part], np.int32),
                "score_targets": np.array([target for _, _, target in part], np.int32),
            }
            sizes = {**batch.dims, "N": len(part), "P": max(1, *counts)}
            found = self._backend.executor.run("score", sizes, inputs, LOGPROB_OUTPUTS).get()
            for i, (request, _, target) in enumerate(part):
                entry = self._token_logprobs(found, i, target, counts[i])
                request.prompt_logprobs.append(entry)

    def _token_logprobs(
        self, found: dict[str, np.ndarray], i: int, token: int, count: int
    ) -> TokenLogprobs:
        """The chosen token first, then the `count` most likely ones."""

        def entry(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self._tokenizer.decode([token], False))

        chosen, rank = float(found["target_logprob"][i]), int(found["target_rank"][i])
        result = {token: entry(token, chosen, rank)}
        for n in range(count):
            top = int(found["top_ids"][i, n])
            result.setdefault(top, entry(top, float(found["top_logprobs"][i, n]), n + 1))
        return result
