"""`tinyvllm top` against a made-up server: printed, piped, on a terminal, and when it is lost."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving import ROOT
from top_figures import figures

from tinyvllm.cli import top_client
from tinyvllm.cli.main import main


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append((self.path, self.headers.get("Authorization")))
        status, body = self.server.answer(len(self.server.paths))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def frame(number, **changes):
    return figures(id=f"f.{number}", **changes)


@contextlib.contextmanager
def answering(answer, port=0):
    """A server whose answers are `answer(number of the request)`: status and body."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.answer, server.paths = answer, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_once_is_text_with_rates(capsys, monkeypatch):
    monkeypatch.setattr(top_client.time, "sleep", lambda seconds: None)
    answer = lambda n: (200, frame(n, rates=None if n == 1 else figures()["rates"]))  # noqa: E731
    with answering(answer) as server:
        assert main(["top", "--url", server.url + "/", "--api-key", "k", "--once"]) == 0
    out = capsys.readouterr().out
    assert "1,234 tokens/s" in out and "500 in use" in out and "\033" not in out
    assert server.paths == [("/dashboard/data?cells=false", "Bearer k")] * 2


def test_once_as_json_is_one_object(capsys, monkeypatch):
    monkeypatch.setenv("TINYVLLM_API_KEY", "from the environment")
    with answering(lambda n: (200, frame(n))) as server:
        assert main(["top", "--url", server.url, "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == frame(1)
    assert server.paths[0][1] == "Bearer from the environment"


ERROR = {"error": {"message": "the server is \033[2Jstopping"}}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, ERROR, "the API key is missing or wrong"),
        (404, b"no", "shows no dashboard"),
        (503, ERROR, "the server is ?[2Jstopping"),
        (500, b"", "status 500"),
        (200, b"<html>", "Expecting value"),
    ],
)
def test_once_without_figures_is_one_line_and_status_1(status, body, message, capsys):
    with answering(lambda n: (status, body)) as server:
        assert main(["top", "--url", server.url, "--once"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("tinyvllm: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--url", "localhost:8000", "--once"], "must begin with http://"),
        (["--url", "file:///etc/passwd", "--once"], "must begin with http://"),
        (["--url", "http://127.0.0.1:1", "--once"], "refused"),
        (["--interval", "0"], "interval=0.0: must be from 0.1 to 3600"),
    ],
)
def test_what_cannot_be_asked_is_one_line(argv, message, capsys):
    assert main(["top", *argv]) == 1
    assert message in capsys.readouterr().err


def start(server, *options, **how):
    command = [sys.executable, "-m", "tinyvllm", "top", "--url", server.url, "--interval", "0.1"]
    env = {**os.environ, "TERM": "xterm"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):  # pytest-xdist sets a size
        env.pop(name, None)
    return subprocess.Popen([*command, *options], cwd=ROOT, env=env, **how)


@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_pipe_it_goes_on_until_the_reader_leaves(as_json):
    with answering(lambda n: (200, frame(n)) if n != 2 else (503, ERROR)) as server:
        options = ["--json"] if as_json else []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with start(server, *options, **pipes) as process:
            lines = []
            while sum("500" in line for line in lines) < 3:
                lines.append(process.stdout.readline())
            process.stdout.close()
            assert process.wait(timeout=20) == 1
            log = process.stderr.read()
    assert "\033" not in "".join(lines) + log
    assert log.count("no connection since") == 1 and "Traceback" not in log
    if as_json:
        assert [json.loads(line)["id"] for line in lines] == ["f.1", "f.3", "f.4"]


class Terminal:
    """A terminal with the program in it; `text` is all that it has written."""

    def __init__(self, server, rows=30, columns=100):
        self.fd, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self.resize(rows, columns)
        self.process = start(server, stdin=theirs, stdout=theirs, stderr=theirs)
        self._theirs = theirs  # kept open, to see in what state it is left
        self.text = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, pattern):
        """Reads on until what comes from now on has the pattern."""
        start, end = len(self.text), time.monotonic() + 30
        while not (found := re.search(pattern, self.text[start:])):
            assert time.monotonic() < end, self.text
            if select.select([self.fd], [], [], 0.1)[0]:
                self.text += os.read(self.fd, 1 << 16).decode()
        return found

    def write(self, text):
        os.write(self.fd, text.encode())

    def left_as_it_was(self):
        return termios.tcgetattr(self._theirs) == self.before

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self._theirs)


@pytest.mark.parametrize("end", ["q", "\x03"])
def test_a_terminal_is_drawn_resized_and_left_as_it_was(end):
    with answering(lambda n: (200, frame(n))) as server, Terminal(server) as terminal:
        terminal.read_until(r"\033\[\?1049h")
        terminal.read_until(r"(?s)\033\[1mtinyvllm: m on a card.*q: quit")
        terminal.resize(12, 30)
        terminal.read_until(r"tinyvllm: m on a card, http://\033\[0m")  # 30 letters
        drawn = terminal.read_until(r"(?s)\033\[H(.*?)q: quit").group(1)
        rows = re.sub(r"\033\[[\d?]*\w", "", drawn).splitlines()
        assert len(rows) <= 12 and max(map(len, rows)) <= 30
        terminal.write("x")
        assert terminal.process.poll() is None
        if end == "q":
            terminal.write("q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(r"\033\[\?1049l")
        assert terminal.process.wait(timeout=20) == (0 if end == "q" else 130)
        assert terminal.left_as_it_was() and "Traceback" not in terminal.text


def test_it_outlives_its_server():
    with answering(lambda n: (200, frame(n))) as server:
        terminal = Terminal(server)
        terminal.read_until("live")
    with terminal:
        terminal.read_until(r"no connection since \d\d:\d\d:\d\d .*refused")
        port = server.server_address[1]
        with answering(lambda n: (200, frame(n, model="another")), port):
            terminal.read_until("another on a card")
            terminal.read_until("live")
        with answering(lambda n: (401, ERROR), port):
            terminal.read_until("the API key is missing or wrong")
            assert terminal.process.wait(timeout=20) == 1
            assert terminal.left_as_it_was()
