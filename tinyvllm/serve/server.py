"""Runs the application: sockets, signals, the engine's end, exit status."""

from __future__ import annotations

import asyncio
import socket
import sys
from types import FrameType

import uvicorn

from tinyvllm.api.async_llm import AsyncLLM
from tinyvllm.serve.app import create_app
from tinyvllm.serve.config import ServeConfig
from tinyvllm.serve.state import ServerState

# For those who ask /health what happened, before the server ends after its engine.
_LAST_WORDS_S = 2.0
_CLOSE_S = 2  # for connections to close when nothing is in flight


class Server(uvicorn.Server):
    """A uvicorn server with our own meaning of signals: the first drains, the second stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.asked_once = asyncio.Event()
        self.asked_twice = asyncio.Event()
        self.listening = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by `serve`."""
        await super().startup(sockets)
        self.listening.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM."""
        self.force_exit = self.asked_twice.is_set()  # a third one: whatever it costs
        event = self.asked_twice if self.asked_once.is_set() else self.asked_once
        # Set here, since another signal may come before the loop's next turn; in the loop too,
        # which wakes it up.
        event.set()
        self._loop.call_soon_threadsafe(event.set)


def run(llm: AsyncLLM, sock: socket.socket, config: ServeConfig, *, verbose: bool) -> int:
    """Serves until a signal or the engine's end; returns the exit status.

    0 after a signal, when the requests under way have ended; 1 after a second signal or when the
    engine has died. `sock` is bound. InputError if the engine cannot start.
    """

    async def serve() -> int:
        try:
            return await _run(llm, sock, config, verbose)
        finally:
            llm.shutdown()

    return asyncio.run(serve())


async def _run(llm: AsyncLLM, sock: socket.socket, config: ServeConfig, verbose: bool) -> int:
    ready = await llm.ready()
    state = ServerState(llm, ready, await llm.get_model(), await llm.get_tokenizer(), config)
    server = Server(
        uvicorn.Config(
            create_app(state),
            lifespan="off",
            log_level="info" if verbose else "warning",
            access_log=verbose,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    died = asyncio.create_task(llm.wait_dead())
    asked = asyncio.create_task(server.asked_once.wait())
    await server.listening.wait()
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"tinyvllm: {', '.join(state.names)} on http://{shown}:{port} "
        f"({ready.where}, on {ready.device_name})",
        file=sys.stderr,
        flush=True,
    )
    tasks: set[asyncio.Task[object]] = {serving, died, asked}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    state.stopping = True
    dead = llm.errored
    if dead:
        print(f"tinyvllm: the engine has ended: {llm.dead_error}", file=sys.stderr, flush=True)
        await asyncio.sleep(_LAST_WORDS_S)
    elif not serving.done():
        if not state.idle.is_set():
            print(
                f"tinyvllm: stopping when the requests under way have ended, in "
                f"{config.shutdown_timeout:g} s at the latest; at once after another signal",
                file=sys.stderr,
                flush=True,
            )
        drained = asyncio.create_task(state.idle.wait())
        hurried = asyncio.create_task(server.asked_twice.wait())
        await asyncio.wait(
            {drained, hurried, serving},
            timeout=config.shutdown_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        drained.cancel()
        hurried.cancel()
    server.should_exit = True
    if not state.idle.is_set():
        llm.shutdown()  # whoever is still served gets an error
    await serving
    died.cancel()
    asked.cancel()
    return 1 if dead or server.asked_twice.is_set() else 0
