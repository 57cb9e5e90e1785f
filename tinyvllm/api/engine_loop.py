"""The engine's process: takes requests from its caller, steps, sends one message a step."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
import traceback
from dataclasses import asdict

from tinyvllm.api.wire import (
    Abort,
    AskStats,
    AskView,
    Channel,
    Command,
    Failed,
    Found,
    Head,
    News,
    Ready,
    Row,
)
from tinyvllm.config import EngineConfig
from tinyvllm.driver.calls import CompileError, CudaError
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.memory.pool import OutOfMemoryError
from tinyvllm.model.hub import resolve_model
from tinyvllm.outputs import RequestOutput
from tinyvllm.util import InputError

WAITING = RequestStatus.WAITING
START_ERRORS = (InputError, CudaError, CompileError, OutOfMemoryError)  # told without a traceback


def main(socket_fd: int, lifeline_fd: int) -> None:
    """Runs until the caller closes its end; `lifeline_fd` is a pipe that it holds while it lives.

    A caller that dies ends this process at once, even in the middle of starting: a thread waits
    for the pipe's end. (The kernel's signal for a parent's death would come when the thread ends
    that started this process.)
    """
    threading.Thread(target=_exit_with_caller, args=(lifeline_fd,), daemon=True).start()
    channel = Channel(socket.socket(fileno=socket_fd))
    config, log_level = channel.receive(wait=True)[0]
    logging.basicConfig(format="%(message)s", level=log_level)
    try:
        engine = _start(config, channel)
    except START_ERRORS as error:
        channel.send(Failed(str(error), by_input=True))
        channel.flush()
        raise SystemExit(1) from None
    try:
        EngineLoop(engine, channel).run()
    except (EOFError, BrokenPipeError):
        engine.close()
    except Exception as error:
        # The device may be in any state, and tokens are lost: the caller decides what follows.
        traceback.print_exc()
        channel.send(Failed(f"{type(error).__name__}: {error}", by_input=False))
        channel.flush()
        raise SystemExit(1) from None


def _exit_with_caller(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)  # nothing is ever written: this returns at the end of the pipe
    os._exit(1)


def _start(config: EngineConfig, channel: Channel) -> LLMEngine:
    model = resolve_model(config.model, config.load_format, config.revision)
    # The caller needs the tokenizer, and must not download the model as well.
    if model.path is None:
        channel.send(Found(config.model, config.revision))
    else:
        channel.send(Found(str(model.path), None))
    engine = LLMEngine(config)
    backend = engine.backend
    channel.send(
        Ready(
            backend.max_model_len,
            backend.device_name,
            engine.model.where,
            backend.memory.num_blocks,
        )
    )
    return engine


class EngineLoop:
    """Steps the engine while there are requests, and waits for some otherwise."""

    def __init__(self, engine: LLMEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._numbers: dict[str, int] = {}  # of requests under way, by their ids
        self._ids: dict[int, str] = {}
        # Requests that have not begun, and when they came; how long the others waited, until
        # their `Head` is sent.
        self._waiting: dict[int, tuple[Request, float]] = {}
        self._waited: dict[int, float | None] = {}
        self._asked: set[type] = set()  # AskStats, AskView: what the next message shall have
        self._num_steps = 0
        self._step_seconds = 0.0
        self._num_views = 0
        self._view_seconds = 0.0  # what `AskView` cost, up to the end of its message

    def run(self) -> None:
        """Never returns: EOFError or BrokenPipeError when the caller has gone."""
        # The model's objects stay: without them the collector's rounds are short, which the many
        # small outputs of streams make frequent.
        gc.collect()
        gc.freeze()
        step_end: float | None = None
        while True:
            news = News([], [], [], None, None)
            for commands in self._channel.receive(wait=step_end is None):
                for command in commands:
                    self._obey(command, news)
            if self._engine.has_unfinished_requests():
                begin = time.perf_counter()
                outputs = self._engine.step()
                self._note_begun(begin)
                for output in outputs:
                    self._report(output, news)
                # From end to end, so that what happens between two steps counts, and what comes
                # before the first one after a pause does not.
                now = time.perf_counter()
                if step_end is not None:
                    self._num_steps += 1
                    self._step_seconds += now - step_end
                step_end = now
            if not self._engine.has_unfinished_requests():
                step_end = None
            if AskView in self._asked:
                self._send_view(news)
            elif self._asked:
                self._channel.send(news._replace(stats=self._stats()))
            elif news.heads or news.rows or news.refused:
                self._channel.send(news)
            self._asked.clear()

    def _send_view(self, news: News) -> None:
        begin = time.perf_counter()
        self._channel.send(news._replace(stats=self._stats(), view=self._engine.view()))
        self._num_views += 1
        self._view_seconds += time.perf_counter() - begin

    def _obey(self, command: Command, news: News) -> None:
        if isinstance(command, (AskStats, AskView)):
            self._asked.add(type(command))
            return
        if isinstance(command, Abort):
            request_id = self._ids.get(command.number)
            output = self._engine.abort_request(request_id) if request_id is not None else None
            if output is not None:
                self._report(output, news)
            return
        prompt = {"prompt_token_ids": command.prompt_token_ids}
        request_id = command.request_id
        try:
            sequences = self._engine.make_requests(
                request_id, prompt, command.params, command.priority
            )
            self._engine.enqueue(request_id, sequences, stream=command.stream)
        except InputError as error:
            news.refused.append((command.number, str(error)))
            return
        self._numbers[request_id] = command.number
        self._ids[command.number] = request_id
        self._waiting[command.number] = sequences[0], time.perf_counter()
        self._waited[command.number] = None

    def _note_begun(self, now: float) -> None:
        """Notes which requests have begun with the step that began `now`."""
        begun = [n for n, (request, _) in self._waiting.items() if request.status is not WAITING]
        for number in begun:
            self._waited[number] = now - self._waiting.pop(number)[1]

    def _report(self, output: RequestOutput, news: News) -> None:
        number = self._numbers[output.request_id]
        if number in self._waited:
            waited = self._waited.pop(number)
            news.heads.append(
                Head(number, output.num_cached_tokens, output.prompt_logprobs, waited)
            )
        for o in output.outputs:
            row: Row = (
                number,
                o.index,
                o.token_ids,
                o.text,
                o.cumulative_logprob,
                o.logprobs,
                o.finish_reason,
                o.stop_reason,
            )
            news.rows.append(row)
        if output.finished:
            del self._numbers[output.request_id], self._ids[number]
            self._waiting.pop(number, None)

    def _stats(self) -> dict[str, float]:
        return {
            **snapshot(self._engine),
            "loop_steps": self._num_steps,
            "loop_seconds": self._step_seconds,
            "views": self._num_views,
            "view_seconds": self._view_seconds,
        }


def snapshot(engine: LLMEngine) -> dict[str, float]:
    """The engine's statistics as plain numbers; those of the pool are called pool_used, say."""
    stats = engine.stats()
    numbers: dict[str, float] = {
        "kv_cache_usage": stats.kv_cache_usage,
        "num_preemptions": stats.num_preemptions_swap + stats.num_preemptions_recompute,
    }
    for name, value in asdict(stats).items():
        if isinstance(value, dict):
            numbers |= {f"{name}_{inner}": number for inner, number in value.items()}
        else:
            numbers[name] = value
    return numbers
