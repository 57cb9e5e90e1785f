"""The life of the server: signals, the engine's death, its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from serving import ROOT, engines_of, serving

from tinyvllm.cli.main import main

STREAM = {"prompt": "ab", "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Stream:
    """A long stream, read in a thread; the lines so far."""

    def __init__(self, server, body=STREAM):
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + "/v1/completions", data, headers)
        self.lines = []
        self._response = urllib.request.urlopen(request, timeout=60)  # its first token has come
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        with closing(self._response):
            for line in self._response:
                if line.startswith(b"data: "):
                    self.lines.append(line[6:].strip().decode())

    def join(self):
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        return self.lines


def is_gone(pid):
    """True when a process has ended within a while."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_sigterm_lets_requests_end_and_refuses_new_ones(model):
    with serving(model) as server:
        engine = server.engine_pid()
        stream = Stream(server, STREAM | {"max_tokens": 400})
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while server.request("/health")[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        status, headers, data = server.request("/v1/completions", {"prompt": "ab"})
        assert status == 503 and "Retry-After" in headers
        assert json.loads(data)["error"]["code"] == "stopping"
        lines = stream.join()
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        status, log = server.wait()
        assert status == 0 and "Traceback" not in log
        assert "stopping when the requests under way have ended, in 30 s at the latest" in log
        assert is_gone(engine)


def test_a_second_signal_stops_at_once(model):
    with serving(model) as server:
        engine = server.engine_pid()
        stream = Stream(server)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        status, log = server.wait()
        assert status == 1 and "Traceback" not in log
        assert is_gone(engine)
        stream.thread.join(timeout=10)


def test_requests_that_outlast_the_time_to_stop_get_an_error(model):
    with serving(model, "--shutdown-timeout", 0.2) as server:
        stream = Stream(server)
        server.process.send_signal(signal.SIGTERM)
        lines = stream.join()
        assert lines[-1] == "[DONE]" and "shut down" in json.loads(lines[-2])["error"]["message"]
        assert server.wait()[0] == 0


def test_when_the_engine_dies_everybody_hears_of_it(model):
    with serving(model) as server:
        stream = Stream(server)
        answers = []
        body = STREAM | {"stream": False}
        waiting = threading.Thread(
            target=lambda: answers.append(server.json("/v1/completions", body))
        )
        waiting.start()
        while server.metric("vllm:num_requests_running") < 2:
            time.sleep(0.05)
        os.kill(server.engine_pid(), signal.SIGKILL)
        lines = stream.join()
        waiting.join(timeout=60)
        # Before the server ends, which leaves a moment to ask.
        status, error = server.json("/health")
        assert status == 503 and error["error"]["code"] == "engine_dead"
        assert server.json("/v1/completions", {"prompt": "ab"})[0] == 503
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["error"]["code"] == "engine_dead"
        ((status, error),) = answers
        assert status == 500 and "status -9" in error["error"]["message"]
        status, log = server.wait()
        assert status == 1 and "the engine has ended" in log and "Traceback" not in log


@pytest.mark.parametrize("busy", [False, True])
def test_the_engine_does_not_outlive_a_server_that_is_killed(model, busy):
    with serving(model) as server:
        engine = server.engine_pid()
        if busy:
            Stream(server)
        server.process.kill()
        assert is_gone(engine)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_before_it_is_ready_ends_it_with_its_engine(tmp_path, sent):
    """The engine hangs in the middle of its start, in a file that nobody ever writes."""
    os.mkfifo(tmp_path / "config.json")
    command = [sys.executable, "-m", "tinyvllm", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not engines_of(process.pid):
                time.sleep(0.05)
            (engine,) = engines_of(process.pid)
            time.sleep(1)  # for both to get where they wait
            process.send_signal(sent)
            assert process.wait(timeout=20) != 0
            assert is_gone(engine)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none-such"], "none-such"),
        (["MODEL", "--max-model-len", "9999"], "max_model_len=9999"),
        (["MODEL", "--port", "TAKEN"], "cannot listen there"),
        (["MODEL", "--port", "70000"], "port=70000"),
        (["MODEL", "--api-key", ""], "api_key"),
        (["MODEL", "--served-model-name", ""], "served_model_name"),
        (["MODEL", "--model", "other"], "give one of them"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_status_1(model, options, message, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"MODEL": str(model), "TAKEN": str(taken.getsockname()[1])}
        argv = [known.get(option, option) for option in options]
        assert main(["serve", "--port", "0", "--device", "cpu", *argv]) == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[-1].startswith("tinyvllm: ") and message in lines[-1]
    assert "Traceback" not in err
