"""What `LLM(..., trace=path)` writes: the CUDA calls of a model's life, and how long ops took."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tinyvllm.driver.recorder import unrecorded
from tinyvllm.driver.trace import Trace
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import Closing

# Of the device's kernels: the first requests are run once more, for a prefill and two decode steps.
MAX_TIMED_REQUESTS, TIMED_TOKENS = 8, 3


class EngineTrace(Closing):
    """Writes a trace around the life of one engine, from before its start to after its end."""

    def __init__(self, trace: str | Path | Trace) -> None:
        self._stack = ExitStack()
        self._trace = trace if isinstance(trace, Trace) else Trace(trace)
        self._stack.callback(self._trace.close)
        self._stack.enter_context(self._trace.recording())
        self._requests: list[tuple[list[int], SamplingParams]] = []

    def begin(self, engine: LLMEngine) -> None:
        """The engine is ready, or awake again. On the CPU, which is not called, its ops are what
        there is."""
        if not engine.backend.asynchronous:
            self._trace.note(
                f"ran on {engine.backend.device_name}: no CUDA calls, so here are the programs run "
                "and their ops, with the host's time of each"
            )
            engine.backend.executor.report_times(self._trace.run)

    def add(self, sequences: list[Request]) -> None:
        """These sequences of a request run; the first few requests are timed in the end."""
        if len(self._requests) < MAX_TIMED_REQUESTS:
            self._requests.append((sequences[0].prompt_token_ids, sequences[0].params))

    def end(self, engine: LLMEngine) -> None:
        """On a GPU: runs like requests once more, kernel by kernel, and writes their times.

        The calls of this pass are not part of the trace.
        """
        if not engine.backend.asynchronous or not self._requests or engine.is_sleeping():
            return
        self._trace.note(
            "kernel times: from a separate eager pass over prompts of the same lengths, without "
            "graphs and without programmatic dependent launch, an event on either side of each "
            "kernel; within a step of the traced run kernels overlap and take less"
        )
        executor = engine.backend.executor
        with unrecorded():
            engine.abort_all()
            executor.report_times(self._trace.run)
            for number, (ids, params) in enumerate(self._requests):
                # Other tokens, since of the same ones K and V are cached.
                other = [(token + 1) % engine.model.config.vocab_size for token in ids]
                alike = replace(
                    params,
                    n=1,
                    max_tokens=min(TIMED_TOKENS, params.max_tokens or TIMED_TOKENS),
                    min_tokens=0,
                    ignore_eos=True,
                    stop=(),
                    stop_token_ids=(),
                    logprobs=None,
                    prompt_logprobs=None,
                )
                engine.add_request(f"trace.{number}", {"prompt_token_ids": other}, alike)
            while engine.has_unfinished_requests():
                engine.step()
            engine.abort_all()
            executor.report_times(None)

    def close(self) -> None:
        self._stack.close()
