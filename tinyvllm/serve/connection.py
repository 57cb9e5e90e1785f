"""Work for a caller that may go away, and streams of server-sent events to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinyvllm.api.engine_process import EngineDeadError
from tinyvllm.serve.errors import ApiError, as_api_error, dump
from tinyvllm.util import InputError

T = TypeVar("T")

KNOWN_ERRORS = (ApiError, InputError, EngineDeadError)
DONE = b"data: [DONE]\n\n"


class CallerLeftError(Exception):
    """The caller went away; nobody reads an answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of `work`, which is cancelled when the caller goes away (CallerLeftError) or
    after so many seconds (ApiError, 504)."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    both: set[asyncio.Task[Any]] = {task, watch}
    try:
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if task in done:
        return task.result()
    if watch in done:
        raise CallerLeftError
    raise ApiError(504, f"the request took more than request_timeout={seconds:g} s")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. An error before the first one is an answer with its status, one
    after it an event of its own. When the caller goes away the source is closed."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], seconds: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._seconds = seconds
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all, as an ASGI application."""
        try:
            await while_connected(receive, self._send_all(send), self._seconds)
        except CallerLeftError:
            return
        except KNOWN_ERRORS as error:
            told = as_api_error(error)
            if not self._begun:
                await told.response()(scope, receive, send)
                return
            await self._send(send, event(told.body) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            async for data in self._source:
                await self._send(send, data)
        finally:
            await self._source.aclose()

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": data, "more_body": True})
