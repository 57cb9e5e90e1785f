"""What `tinyvllm top` does: asks a server again and again, and draws or prints its figures."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import sys
import termios
import threading
import time
import tty
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from tinyvllm.cli.top_screen import Screen, printable
from tinyvllm.util import InputError

_PATIENCE_S = 5.0  # for an answer
_LOOK_S = 0.2  # for a key, or a new size of the terminal
_STALE_S = 4.0


def show(server: Server, interval: float, *, once: bool, as_json: bool) -> None:
    """Shows figures until q or Ctrl-C is pressed, or prints them where there is no terminal."""
    if once:
        _print_once(server, as_json=as_json)
    elif as_json or not sys.stdout.isatty():
        _print_all(server, interval, as_json=as_json)
    else:
        _watch(server, interval)


class NoConnectionError(Exception):
    """The server cannot be reached now, or has nothing to say; it may later."""


class Server:
    """Asks a server for its figures. InputError for an address or a key that will never do."""

    def __init__(self, url: str, key: str | None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InputError(f"url={url!r}: must begin with http:// or https://")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self) -> dict[str, Any]:
        """The newest figures."""
        request = urllib.request.Request(
            f"{self.url}/dashboard/data?cells=false", headers=self._headers
        )
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
                data: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, ValueError) as error:  # the latter: what answers is not tinyvllm
            raise NoConnectionError(str(getattr(error, "reason", error))) from None
        return data

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        if error.code == 401:
            return InputError("the API key is missing or wrong: --api-key, or TINYVLLM_API_KEY")
        if error.code == 404:
            return InputError(
                f"url={self.url}: it shows no dashboard; it was started with --no-dashboard, or is "
                "another program"
            )
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return NoConnectionError(json.load(error)["error"]["message"])
        return NoConnectionError(f"status {error.code}")


def _print_once(server: Server, *, as_json: bool) -> None:
    try:
        data = server.ask()
        if data["rates"] is None:  # they need two looks
            time.sleep(1)
            data = server.ask()
    except NoConnectionError as error:
        raise InputError(f"url={server.url}: {printable(str(error))}") from None
    _print(data, server, as_json=as_json)


def _print_all(server: Server, interval: float, *, as_json: bool) -> None:
    lost = False
    while True:
        try:
            _print(server.ask(), server, as_json=as_json)
            lost = False
        except NoConnectionError as error:
            if not lost:
                print(f"tinyvllm: {_lost(time.time(), error)}", file=sys.stderr, flush=True)
            lost = True
        time.sleep(interval)


def _print(data: dict[str, Any], server: Server, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(data), flush=True)
    else:
        lines = Screen(120, None, colours=False).lines(data, server.url, "live", live=True)
        print("\n".join(lines) + "\n", flush=True)


def _lost(since: float, error: Exception) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(since))
    return f"no connection since {moment} ({printable(str(error))}), trying again"


class _Watcher(threading.Thread):
    """Asks again and again, so that keys are heard while an answer takes its time."""

    def __init__(self, server: Server, interval: float) -> None:
        super().__init__(daemon=True)
        self.found: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._server, self._interval = server, interval

    def run(self) -> None:
        """Puts figures, or why there are none; ends with an error that stays."""
        while True:
            try:
                self.found.put(self._server.ask())
            except NoConnectionError as error:
                self.found.put(error)
            except InputError as error:
                self.found.put(error)
                return
            time.sleep(self._interval)


def _watch(server: Server, interval: float) -> None:
    watcher = _Watcher(server, interval)
    watcher.start()
    picture = _Picture(server.url)
    with _full_screen() as keys:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    picture.take(watcher.found.get_nowait())
            picture.draw()
            if keys is None:
                time.sleep(_LOOK_S)
            elif select.select([keys], [], [], _LOOK_S)[0]:
                pressed = os.read(keys, 100)
                if not pressed or b"q" in pressed.lower():  # the terminal has gone, or enough
                    return


class _Picture:
    """What is on the screen: the newest figures, and how the connection is."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._data: dict[str, Any] | None = None
        self._status = "connecting"
        self._lost: float | None = None  # since when
        self._came = 0.0
        self._drawn: tuple[Any, ...] = ()

    def take(self, found: dict[str, Any] | Exception) -> None:
        if isinstance(found, InputError):
            raise found
        if isinstance(found, Exception):
            self._lost = self._lost or time.time()
            self._status = _lost(self._lost, found)
            return
        if self._data is None or self._data["id"] != found["id"]:
            self._data, self._came = found, time.monotonic()
        stale = time.monotonic() - self._came > _STALE_S
        self._lost, self._status = None, "the engine is in a long step" if stale else "live"

    def draw(self) -> None:
        """Draws what has changed: figures, status, or the size of the terminal."""
        width, height = shutil.get_terminal_size()
        state = (width, height, self._status, self._data and self._data["id"])
        if state == self._drawn:
            return
        self._drawn = state
        rows = height - 1
        if self._data is None:
            lines = [f"tinyvllm: {self._url}"[:width], self._status[:width]]
        else:
            colours = "NO_COLOR" not in os.environ
            screen = Screen(width, rows, colours)
            lines = screen.lines(self._data, self._url, self._status, live=self._lost is None)
        # Each line is wiped behind its end, and what is below the last one: nothing flickers.
        text = "".join(f"{line}\033[K\n" for line in lines[:rows])
        sys.stdout.write(f"\033[H{text}\033[J\033[2mq: quit\033[0m")
        sys.stdout.flush()


@contextlib.contextmanager
def _full_screen() -> Iterator[int | None]:
    """The terminal's other screen; gives the descriptor that keys come from, if there is one."""
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if keys is None else termios.tcgetattr(keys)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write("\033[?1049h\033[?25l")
        yield keys
    finally:
        sys.stdout.write("\033[?25h\033[?1049l")
        sys.stdout.flush()
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
