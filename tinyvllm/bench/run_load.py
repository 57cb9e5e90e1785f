"""A load run through an engine, and what its callers and the host saw of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tinyvllm.bench.loads import Load
from tinyvllm.bench.step_floors import StepWork
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.progress import Progress
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import frozen_heap

LATE = 20e-6  # seconds; who waits for less found the device done


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Percentiles:
        """All 0 for no values."""
        values = np.array(seconds or [0.0]) * 1e3
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        return Percentiles(p50, p99, float(values.max()))


@dataclass(frozen=True)
class LoadResult:
    """One run. `host_s` is the host's own work, most of it while the device works; `waited_s` is
    the time in which it waited for the device. In `num_late_steps` it did not have to wait: the
    device may have stood still. `work` are the steps, for their floors."""

    seconds: float
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    ttft: Percentiles  # from the arrival to the first token
    tbt: Percentiles  # from a token to the next of the same sequence
    num_preemptions: int
    num_steps: int
    num_prompt_steps: int  # of these, with tokens of prompts
    num_late_steps: int
    host_s: float
    waited_s: float
    work: list[StepWork]

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


@dataclass(slots=True)
class _Watched:
    """A request on its way: when it arrived and when each of its tokens was there."""

    request: Request
    arrival: float
    times: list[float] = field(default_factory=list)


class _Watch:
    """The requests by id, those that run, and the steps."""

    def __init__(self) -> None:
        self.requests: dict[str, _Watched] = {}
        self.work: list[StepWork] = []
        self._running: dict[str, _Watched] = {}

    def launched(self, step: ScheduledStep) -> None:
        """To be called with each step."""
        self.work.append(StepWork.of(step))
        for row in step.joins:
            name = row.request.request_id
            self._running[name] = self.requests[name]

    def stepped(self, now: float, finished: bool) -> int:
        """Notes which requests have got a token, and returns how many; `finished`: some ended."""
        count = 0
        for watched in self._running.values():
            if len(watched.request.output_token_ids) > len(watched.times):
                watched.times.append(now)
                count += 1
        if finished:
            running = self._running
            self._running = {n: w for n, w in running.items() if not w.request.finished}
        return count


def run_load(engine: LLMEngine, load: Load, *, shown: bool = True) -> LoadResult:
    """Runs the requests of a load, each from its arrival on, and no other request.

    Every output has the length that the load says: end-of-sequence tokens are ignored.
    """
    executor = engine.backend.executor
    watch = _Watch()
    params = [
        SamplingParams(temperature=load.temperature, max_tokens=r.output_len, ignore_eos=True)
        for r in load.requests
    ]
    late, slept = 0, 0.0
    before = engine.stats()
    engine.on_launch = watch.launched
    waited_before = getattr(executor, "waited", 0.0)
    start = now = time.perf_counter()
    todo = list(enumerate(load.requests))[::-1]
    with frozen_heap(), Progress(load.num_output_tokens, load.name, "tok", shown=shown) as bar:
        while todo or engine.has_unfinished_requests():
            while todo and todo[-1][1].arrival <= now - start:
                i, request = todo.pop()
                made = _add(engine, f"{load.name}.{i}", request.prompt, params[i])
                watch.requests[made.request_id] = _Watched(made, start + request.arrival)
            if not engine.has_unfinished_requests():
                pause = start + todo[-1][1].arrival - now
                time.sleep(pause)
                slept += pause
                now = time.perf_counter()
                continue
            waited = getattr(executor, "waited", 0.0)
            finished = bool(engine.step())
            now = time.perf_counter()
            late += getattr(executor, "waited", 0.0) - waited < LATE
            bar.update(watch.stepped(now, finished))
    engine.on_launch = None
    seconds = now - start
    after, done, work = engine.stats(), list(watch.requests.values()), watch.work
    waited = getattr(executor, "waited", 0.0) - waited_before
    return LoadResult(
        seconds=seconds,
        num_requests=len(done),
        num_input_tokens=load.num_input_tokens,
        num_output_tokens=sum(len(watched.times) for watched in done),
        ttft=Percentiles.of([watched.times[0] - watched.arrival for watched in done]),
        tbt=Percentiles.of([b - a for one in done for a, b in itertools.pairwise(one.times)]),
        num_preemptions=(
            after.num_preemptions_swap
            + after.num_preemptions_recompute
            - before.num_preemptions_swap
            - before.num_preemptions_recompute
        ),
        num_steps=len(work),
        num_prompt_steps=sum(bool(one.chunks) for one in work),
        num_late_steps=late,
        host_s=seconds - waited - slept,
        waited_s=waited,
        work=work,
    )


def _add(engine: LLMEngine, request_id: str, prompt: list[int], params: SamplingParams) -> Request:
    (made,) = engine.make_requests(request_id, {"prompt_token_ids": prompt}, params)
    engine.enqueue(request_id, [made])
    return made
