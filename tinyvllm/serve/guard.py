"""What stands before every endpoint: the key, the limits of body, time and number, the stop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinyvllm.serve.errors import ApiError
from tinyvllm.serve.page import FILES
from tinyvllm.serve.state import ServerState

# Without a key: probes, scrapers, and a page that is the same for all and asks for the key.
OPEN_PATHS = frozenset({"/health", "/version", "/metrics", *FILES})
# A body that is too large is read so much further: a caller that still sends does not read.
_DISCARDED = 4


class Guard:
    """An ASGI application around another; requests that it refuses never reach the inner one."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        key = state.config.api_key
        self._key = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, with its whole body read, or answers it with an error."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        state = self._state
        try:
            self._check_key(scope)
            state.check_serving()
            with state.in_flight():
                body = await self._read_body(receive)
                if body:
                    _check_type(scope)
                if body is not None:
                    await self._app(scope, _replay(body, receive), send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None:
            return
        sent = _header(scope, b"authorization")
        scheme, _, key = sent.partition(b" ")
        # Digests are compared in constant time, and have the same length for every key.
        right = hmac.compare_digest(_digest(key.strip()), self._key)
        if not right or scheme.lower() != b"bearer":
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The body; None when the caller went away."""
        limit, seconds = self._state.config.max_body_bytes, self._state.config.body_timeout
        parts, size, more = [], 0, True

        async def read() -> bool:
            nonlocal size, more
            while more and size <= _DISCARDED * limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                part = message.get("body", b"")
                size += len(part)
                if size <= limit:
                    parts.append(part)
                more = message.get("more_body", False)
            return True

        try:
            there = await asyncio.wait_for(read(), seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
        if not there:
            return None
        if size > limit:
            raise ApiError(413, f"the body has more than max_body_bytes={limit} bytes")
        return b"".join(parts)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _check_type(scope: Scope) -> None:
    """400 unless the body says that it is JSON. A web page may send anything else to any address
    without asking first."""
    kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(400, f"Content-Type: {kind[:80]!r}: must be application/json")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, and then what `receive` gives: the caller's going."""
    first = True

    async def replayed() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
