"""The dashboard: a page that is open to all, and what it shows, for those who have the key."""

from __future__ import annotations

import asyncio
import base64
import gzip
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

import tinyvllm
from tinyvllm.engine.view import EngineView
from tinyvllm.serve.errors import ApiError, dump
from tinyvllm.serve.page import FILES
from tinyvllm.serve.recent import Recent
from tinyvllm.serve.state import ServerState

# The engine looks at its blocks at most once in this time, however many watch, and only for them.
INTERVAL_S = 0.9
_PATIENCE_S = 3.0  # for the step under way to end; after that the last frame must do
_OLDEST_RATES_S = 10.0  # rates over more time than that say nothing of now
_KEPT_FRAMES = 4  # for those who watch and have one of them, what has changed since is enough
_COUNTERS = (
    "generation_tokens",
    "prefill_tokens",
    "loop_steps",
    "loop_seconds",
    "views",
    "view_seconds",
)

_PAGE_HEADERS = {
    # The page makes no HTML out of text: the browser refuses it to any script (trusted types).
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_dashboard(app: FastAPI, state: ServerState) -> None:
    """Adds the page, its files and its data to the application."""
    for path, (kind, content) in FILES.items():
        _add_file(app, path, kind, content)
    dashboard = Dashboard(state)

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(request: Request, since: str = "", cells: bool = True) -> Response:
        packed = "gzip" in request.headers.get("accept-encoding", "")
        body = await dashboard.data(since, cells=cells, packed=packed)
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        return Response(body, headers=headers, media_type="application/json")


def _add_file(app: FastAPI, path: str, kind: str, content: bytes) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=kind)


@dataclass(frozen=True)
class _Frame:
    """The engine at one moment. `id` is another one after a restart of the server, too."""

    id: str
    stats: dict[str, float]
    view: EngineView
    summary: dict[str, Any]


class Dashboard:
    """What the page and `tinyvllm top` ask for, at most one look at the engine each interval.

    `clock` gives seconds.
    """

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._name = secrets.token_hex(4)
        self._frames: deque[_Frame] = deque(maxlen=_KEPT_FRAMES)
        self._num_frames = 0
        self._came = 0.0  # when the newest did
        self._next = 0.0  # when the engine may be asked again
        self._bodies: dict[tuple[str | None, bool, bool], bytes] = {}  # of the newest frame
        self._lock = asyncio.Lock()

    async def data(self, since: str, *, cells: bool, packed: bool) -> bytes:
        """The newest frame as JSON, with `packed` compressed by gzip.

        cells: with what is in each block. since: the `id` of a frame that the caller has; if it
        is still known here, `base` is the same, and cells are to be combined with those of that
        frame by exclusive or: most are 0 then.
        """
        async with self._lock:
            frame = await self._newest()
            base = next((f for f in self._frames if cells and _is_base(f, since, frame)), None)
            key = (base.id if base else None, cells, packed)
            if key not in self._bodies:
                self._bodies[key] = await asyncio.to_thread(_body, frame, base, cells, packed)
            return self._bodies[key]

    async def _newest(self) -> _Frame:
        if self._clock() >= self._next:
            found = await self._state.llm.get_view(_PATIENCE_S)
            self._next = self._clock() + INTERVAL_S
            if found and not (self._frames and self._frames[-1].view is found[1]):
                self._add(*found)
        if not self._frames:
            raise ApiError(503, "the engine has not answered yet", retry_after=1)
        return self._frames[-1]

    def _add(self, stats: dict[str, float], view: EngineView) -> None:
        now, rates = self._clock(), None
        seconds = now - self._came
        if self._frames and seconds <= _OLDEST_RATES_S:
            before = self._frames[-1].stats
            rates = {name: (stats[name] - before[name]) / seconds for name in _COUNTERS}
            rates["seconds"] = seconds
        self._came = now
        self._num_frames += 1
        frame_id = f"{self._name}.{self._num_frames}"
        state = self._state
        config, metrics = state.llm.config, state.metrics
        summary = {
            "id": frame_id,
            "time": view.time,
            "version": tinyvllm.__version__,
            "model": state.names[0],
            "device": state.device_name,
            "started": state.created,
            "config": {
                "block_size": config.block_size,
                "max_model_len": state.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "preemption_threshold": config.preemption_threshold,
            },
            "stats": stats,
            "rates": rates,  # a second, over the last so many seconds
            "first_token": _quantiles(metrics.recent_first_token),
            "next_token": _quantiles(metrics.recent_next_token),
            "requests": [request._asdict() for request in view.requests],
            "requests_left_out": view.num_requests_left_out,
            "events": [event._asdict() for event in view.events],
        }
        self._frames.append(_Frame(frame_id, stats, view, summary))
        self._bodies.clear()


def _quantiles(recent: Recent) -> dict[str, float | None]:
    count, found = recent.quantiles(0.5, 0.99)
    p50, p99 = found or (None, None)
    return {"count": count, "p50": p50, "p99": p99}


def _body(frame: _Frame, base: _Frame | None, cells: bool, packed: bool) -> bytes:
    value = frame.summary
    if cells:
        value = value | {
            "base": base.id if base else None,
            "cells": _encode(frame.view.cells, base.view.cells if base else None),
            "host_cells": _encode(frame.view.host_cells, base.view.host_cells if base else None),
        }
    body = dump(value)
    return gzip.compress(body, 1) if packed else body


def _is_base(known: _Frame, since: str, frame: _Frame) -> bool:
    # The swap space shrinks when the machine cannot pin as much.
    return known.id == since and len(known.view.host_cells) == len(frame.view.host_cells)


def _encode(cells: bytes, base: bytes | None) -> str:
    if base is not None:
        cells = (np.frombuffer(cells, np.uint8) ^ np.frombuffer(base, np.uint8)).tobytes()
    return base64.b64encode(cells).decode()
