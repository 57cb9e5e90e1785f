"""The engine's loop: schedule a step, launch it, take the tokens of the one before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

from tinyvllm.config import EngineConfig, check_int
from tinyvllm.driver.calls import phase
from tinyvllm.engine.backend import Backend, open_backend
from tinyvllm.engine.monitor import Monitor
from tinyvllm.engine.output_processor import OutputProcessor
from tinyvllm.engine.policy import order_of
from tinyvllm.engine.request import Request
from tinyvllm.engine.request_maker import RequestMaker
from tinyvllm.engine.runner import ModelRunner, RunningStep
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.engine.stats import EngineStats
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.engine.view import EngineView, Viewer
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.model.chat import ChatTemplate
from tinyvllm.model.hub import resolve_model
from tinyvllm.outputs import RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError, log_start, logger


class LLMEngine:
    """Requests in, tokens out, one step at a time. Use `LLM` unless you need the steps.

    What goes in and comes out are plain values that can be pickled. Raises InputError for
    options, files and requests that cannot be served.
    """

    def __init__(self, config: EngineConfig, backend: Backend | None = None) -> None:
        log_start("imports")
        self.config = config
        order_of(config.scheduling_policy)  # errors in the options come before the work
        self.model = resolve_model(config.model, config.load_format, config.revision)
        self.tokenizer = self.model.tokenizer()
        log_start("model's configuration and tokenizer")
        self.backend = backend or open_backend(config, self.model)
        self.scheduler = Scheduler(
            config,
            BlockManager(self.backend.memory.num_blocks, config.block_size),
            max_model_len=self.backend.max_model_len,
            vocab_size=self.model.config.vocab_size,
            swapper=self.backend.swapper,
        )
        self._maker = RequestMaker(self.tokenizer, self.model.config, self.scheduler)
        self._runner = ModelRunner(
            self.backend, self.tokenizer, seed=config.seed, enforce_eager=config.enforce_eager
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._running: deque[RunningStep] = deque()
        self._last_end = 0.0  # time.perf_counter() when the last step had ended
        self._monitor = Monitor(self.scheduler, self.backend, log=not config.disable_log_stats)
        self.on_launch: Callable[[ScheduledStep], None] | None = None  # for whoever measures
        self._viewer = Viewer(self.scheduler)
        self._closed = False
        self._sleeping = False
        # Launching step n + 1 before reading the tokens of step n keeps a GPU busy while the host
        # works; the CPU is the host, and would only compute rows that have ended.
        launch_ahead = config.async_scheduling
        if launch_ahead is None:
            launch_ahead = self.backend.asynchronous
        self._max_running = 2 if launch_ahead else 1
        log_start("scheduler")

    def make_requests(
        self, request_id: str, prompt: Any, params: SamplingParams, priority: int = 0
    ) -> list[Request]:
        """The checked sequences of a request, params.n of them; `enqueue` starts them."""
        self._check_awake()
        return self._maker.make(request_id, prompt, params, priority)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        stream: bool = False,
    ) -> None:
        """Queues a prompt: text, or {"prompt_token_ids": [...]}.

        A lower `priority` is more urgent. With `stream`, `step` reports the request after each
        token, with the new text alone.
        """
        requests = self.make_requests(request_id, prompt, params, priority)
        self.enqueue(request_id, requests, stream=stream)

    def enqueue(self, request_id: str, requests: list[Request], *, stream: bool = False) -> None:
        """Queues what `make_requests` returned."""
        self._check_awake()
        if not self.scheduler.has_unfinished():
            self._monitor.resumed()
        for i, request in enumerate(requests):
            try:
                self.scheduler.add(request)
            except InputError:  # the id of a sample may be taken: then none of them runs
                for added in requests[:i]:
                    self.scheduler.abort(added.request_id)
                raise
        self._outputs.add(request_id, requests, stream)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once, frees its blocks and returns what there is of it.

        None for an id that is unknown, which is no error: the request may just have finished.
        """
        for request in self._outputs.sequences(request_id):
            self.scheduler.abort(request.request_id)
        return self._outputs.remove(request_id)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; InputError if it has none."""
        return self.model.chat_template()

    def has_request(self, request_id: str) -> bool:
        """True from `add_request` until the request is reported finished, or aborted."""
        return bool(self._outputs.sequences(request_id))

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Launches a step and takes the tokens of an earlier one (or of the same, on the CPU).

        Returns the requests that finished and news of those that stream. It waits for the device
        once at the most, for the tokens that it takes. After an exception the steps under way
        are lost: `abort_all` must be called before the next one.
        """
        self._check_open()
        self.backend.enter()
        news: list[RequestOutput] = []
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._running.append(self._runner.launch(scheduled))
            self.scheduler.launched(scheduled)
            self._monitor.launched(scheduled)
            if self.on_launch:
                self.on_launch(scheduled)
        if not self._running:
            self.scheduler.wait_for_copy()  # if there are any, all others wait for them
        elif scheduled is None or len(self._running) == self._max_running:
            news = self._take(self._running[0])
            self._running.popleft()
            self._monitor.stepped()
        # Last, so that after an exception `abort_all` still has them.
        failed = self.scheduler.take_failed()
        return [*news, *self._outputs.outputs(failed, failed)]

    def _take(self, running: RunningStep) -> list[RequestOutput]:
        tokens = self._runner.finish(running)
        self._measure(running)
        ended = self.scheduler.update(running.step, tokens)
        touched = [row.request for row in running.step.sampling_rows]
        for request, stop in self._outputs.find_stops(touched):
            self.scheduler.stop(request, stop)
        return self._outputs.outputs(touched, ended)

    def _measure(self, running: RunningStep) -> None:
        """Counts a step that has just ended, if most of its tokens are of prompts."""
        now = time.perf_counter()
        step = running.step
        num_prompt = step.num_tokens - step.num_decodes
        if num_prompt > step.num_decodes:
            # The device began with it after the step before.
            seconds = now - max(running.launched, self._last_end)
            self.scheduler.prefill_rate.add(num_prompt, seconds)
        self._last_end = now

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done; takes about 0.5 us a sequence."""
        self._check_open()
        self.backend.enter()
        self._end_idle_copies()
        return self._monitor.stats()

    def view(self) -> EngineView:
        """What is in each KV block, and where each request stands; takes a few milliseconds for
        256 sequences in 200,000 blocks."""
        return self._viewer.look()

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request and forgets the steps under way; returns what there is of each."""
        self._discard_running()
        self.scheduler.take_failed()
        outputs = [self.abort_request(request_id) for request_id in self._outputs.request_ids]
        return [output for output in outputs if output is not None]

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until `wake_up`; the prefix cache is lost.

        At level 1 the weights stay in (pinned) host memory, at level 2 waking reads them from the
        model's files again. InputError for another level, and while requests are unfinished. An
        engine that sleeps already stays as it is, with a line in the log.
        """
        self._check_open()
        check_int("level", level, 1, 2)
        if self._sleeping:
            logger.warning("sleep(level=%d): the engine is sleeping already", level)
            return
        if self.has_unfinished_requests():
            raise InputError(
                "sleep: requests are unfinished; wait for their ends, or abort them, first"
            )
        start = time.perf_counter()
        self.backend.enter()
        self._discard_running()  # launched before the last ends were known
        self.scheduler.end_copies()
        self.backend.sleep(level)
        self._sleeping = True
        self.reset_prefix_cache()
        logger.info("asleep at level %d after %.2f s", level, time.perf_counter() - start)

    def wake_up(self) -> None:
        """Makes a sleeping engine ready again; one that is awake only logs that.

        Raises InputError when files cannot be read any more and OutOfMemoryError when others have
        taken the memory meanwhile; the engine then sleeps on, and may be woken again.
        """
        self._check_open()
        if not self._sleeping:
            logger.warning("wake_up: the engine is not sleeping")
            return
        start = time.perf_counter()
        self.backend.enter()
        self.backend.wake_up()
        self._sleeping = False
        logger.info("awake after %.2f s", time.perf_counter() - start)

    def is_sleeping(self) -> bool:
        """True from `sleep` to `wake_up`."""
        return self._sleeping

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, with nothing done, while requests hold blocks."""
        self._end_idle_copies()
        num_used = self.scheduler.blocks.num_used
        if num_used:
            logger.warning("the prefix cache is not reset: requests hold %d blocks", num_used)
            return False
        if self.scheduler.tables.cache is not None:
            self.scheduler.tables.cache.reset()
        return True

    def close(self) -> None:
        """Frees the device. The engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            with phase("shut-down"):
                self.backend.enter()
                self._discard_running()
                self.backend.close()

    def _end_idle_copies(self) -> None:
        """Waits for copies of blocks whose requests have all ended: no step looks at them again."""
        if not self.scheduler.has_unfinished():
            self.scheduler.end_copies()

    def _discard_running(self) -> None:
        while self._running:
            self._running.popleft().discard()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine has been closed")

    def _check_awake(self) -> None:
        self._check_open()
        if self._sleeping:
            raise RuntimeError("the engine sleeps and takes no requests: call wake_up() first")
