"""Inference for asyncio: many requests at once, the engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Any

from tinyvllm.api.engine_process import EngineDeadError, EngineProcess
from tinyvllm.api.request_stream import RequestStream
from tinyvllm.api.wire import (
    Abort,
    AskStats,
    AskView,
    Command,
    Failed,
    Found,
    News,
    Ready,
    frame,
    receive,
)
from tinyvllm.config import EngineConfig
from tinyvllm.engine.prompt import tokenize
from tinyvllm.engine.view import EngineView
from tinyvllm.model.hub import LocalModel, resolve_model
from tinyvllm.model.tokenizer import LONG_TEXT, Tokenizer
from tinyvllm.outputs import RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError


class AsyncLLM:
    """A model that serves many requests at once. Options are those of `EngineConfig`.

    Creating it starts the engine's process and returns at once; `ready` waits until it can serve.
    All methods belong to one event loop, `shutdown` included. Call that to end the engine, or use
    the object as an asynchronous context manager.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._begin(EngineProcess(EngineConfig(model=model, **options)))

    @classmethod
    def from_process(cls, process: EngineProcess) -> AsyncLLM:
        """Takes over an engine that has been started: before this module was imported, say."""
        llm = cls.__new__(cls)
        llm._begin(process)
        return llm

    def _begin(self, process: EngineProcess) -> None:
        self.config = process.config
        self._stats: dict[str, float] = {}
        self._stats_came = asyncio.Event()
        self._view: tuple[dict[str, float], EngineView] | None = None
        self._view_came = asyncio.Event()
        self._process = process
        self._numbers = itertools.count()
        self._requests: dict[int, RequestStream] = {}
        self._by_id: dict[str, RequestStream] = {}
        self._commands: list[Command] = []  # of this turn of the event loop
        self._starting: asyncio.Task[tuple[Ready, LocalModel, Tokenizer]] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._dead: EngineDeadError | None = None
        self._died = asyncio.Event()
        self._stopped = False

    async def ready(self) -> Ready:
        """Waits until the model is loaded; returns what the engine says about it.

        InputError if the options, the model or the device are at fault.
        """
        return (await self._start())[0]

    async def generate(
        self,
        prompt: str | dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt, text or {"prompt_token_ids": [...]}; yields until it has finished.

        As with `LLM.stream` each output holds what is new: one token or, if the caller is slower
        than the engine, several. With `stream` False there is one output, the whole. A lower
        `priority` is more urgent. Leaving the loop ends the request. InputError for a request
        that cannot be served, EngineDeadError when the engine has ended.
        """
        ready, _, tokenizer = await self._start()
        if self._dead is not None:
            raise self._dead
        if request_id in self._by_id:
            raise InputError(f"request_id={request_id!r}: a request of that name is under way")
        if isinstance(prompt, str) and len(prompt) >= LONG_TEXT:
            tokens = await asyncio.to_thread(tokenize, tokenizer, request_id, prompt)
        else:
            tokens = tokenize(tokenizer, request_id, prompt)
        if len(tokens[1]) >= ready.max_model_len:  # the engine need not look at it
            raise InputError(
                f"request {request_id!r}: the prompt has {len(tokens[1])} tokens; it may have "
                f"{ready.max_model_len - 1} with max_model_len={ready.max_model_len}"
            )
        request = RequestStream(next(self._numbers), request_id, tokens, sampling_params, tokenizer)
        self._requests[request.number] = self._by_id[request_id] = request
        self._send(request.command(priority, stream))
        try:
            finished = False
            while not finished:
                output = await request.take()
                finished = output.finished
                yield output
        finally:
            del self._requests[request.number], self._by_id[request_id]
            if not request.finished:
                self._send(Abort(request.number))

    async def abort(self, request_id: str) -> None:
        """Ends a request at the next step; its last output has the finish reason "abort"."""
        if request_id in self._by_id:
            self._send(Abort(self._by_id[request_id].number))

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return (await self._start())[2]

    async def get_model(self) -> LocalModel:
        """The model's configuration, template and defaults; its weights are the engine's."""
        return (await self._start())[1]

    async def get_stats(self, seconds: float = 1.0) -> dict[str, float]:
        """The engine's numbers by name, as they are at the end of the step under way.

        Where that takes longer than so many seconds, or the engine has ended, the last ones known.
        """
        await self._ask(AskStats(), self._stats_came, seconds)
        return self._stats

    async def get_view(self, seconds: float = 1.0) -> tuple[dict[str, float], EngineView] | None:
        """The numbers, and what blocks and requests look like, of one moment; else as above.

        None before the first ones have come.
        """
        await self._ask(AskView(), self._view_came, seconds)
        return self._view

    async def _ask(self, command: Command, came: asyncio.Event, seconds: float) -> None:
        if self.is_running and self._reading is not None:
            came.clear()
            self._send(command)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(came.wait(), seconds)

    @property
    def is_running(self) -> bool:
        """True until the engine is shut down or dies."""
        return not self._stopped and self._dead is None

    @property
    def is_stopped(self) -> bool:
        """True after `shutdown`."""
        return self._stopped

    @property
    def errored(self) -> bool:
        """True when the engine's process has ended by itself."""
        return self._dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that requests get after the engine's end."""
        return self._dead or EngineDeadError("the engine has been shut down")

    async def check_health(self) -> None:
        """EngineDeadError when the engine has ended."""
        if not self.is_running:
            raise self.dead_error

    async def wait_dead(self) -> EngineDeadError:
        """Waits until the engine ends by itself, or is shut down, and returns the error."""
        await self._died.wait()
        return self.dead_error

    def shutdown(self) -> None:
        """Ends the engine and waits for it; requests under way get an EngineDeadError."""
        if self._stopped:
            return
        self._stopped = True
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is None:
            self._process.kill()  # it does not listen before it has started
        else:
            self._process.close()
        self._end_all(EngineDeadError("the engine has been shut down"))

    async def __aenter__(self) -> AsyncLLM:
        await self.ready()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.shutdown()

    async def _start(self) -> tuple[Ready, LocalModel, Tokenizer]:
        if self._stopped:
            raise self.dead_error
        if self._starting is None:
            self._starting = asyncio.create_task(self._connect())
        if self._starting.done():
            return self._starting.result()
        # Shielded: a request that gives up must not end the start for others.
        return await asyncio.shield(self._starting)

    async def _connect(self) -> tuple[Ready, LocalModel, Tokenizer]:
        reader, self._writer = await asyncio.open_connection(sock=self._process.socket)
        try:
            found = await self._receive(reader)
            model, tokenizer = await asyncio.to_thread(self._load, found)
            ready = await self._receive(reader)
        except EngineDeadError as error:
            self._end_all(error)
            raise
        assert isinstance(ready, Ready), ready
        self._reading = asyncio.create_task(self._read(reader))
        return ready, model, tokenizer

    def _load(self, found: Found) -> tuple[LocalModel, Tokenizer]:
        model = resolve_model(found.model, self.config.load_format, found.revision)
        return model, model.tokenizer()

    async def _receive(self, reader: asyncio.StreamReader) -> Any:
        """The next message; raises what the engine ends with."""
        try:
            message = await receive(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await asyncio.to_thread(self._process.process.wait)
            raise EngineDeadError(f"the engine's process ended with status {code}") from None
        if isinstance(message, Failed):
            kind = InputError if message.by_input else EngineDeadError
            raise kind(message.message)
        return message

    async def _read(self, reader: asyncio.StreamReader) -> None:
        end = EngineDeadError("the engine's messages cannot be read")  # should there be a bug
        try:
            while True:
                self._deliver(await self._receive(reader))
        except EngineDeadError as error:
            end = error
        finally:
            self._end_all(end)

    def _deliver(self, news: News) -> None:
        requests = self._requests
        for head in news.heads:
            if head.number in requests:
                requests[head.number].begin(head)
        for row in news.rows:
            request = requests.get(row[0])
            if request is not None:  # else its caller has left
                request.add(row)
        for number, reason in news.refused:
            if number in requests:
                requests[number].fail(InputError(reason))
        if news.stats is not None:
            self._stats = news.stats
            self._stats_came.set()
            if news.view is not None:
                self._view = news.stats, news.view
                self._view_came.set()

    def _end_all(self, error: EngineDeadError) -> None:
        if self._died.is_set():
            return
        if not self._stopped:
            self._dead = error
        for request in self._requests.values():
            request.fail(error)
        self._died.set()

    def _send(self, command: Command) -> None:
        """Sends a command together with the others of this turn of the event loop."""
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if self._writer is not None and self.is_running:
            self._writer.write(frame(commands))
