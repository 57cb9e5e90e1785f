"""Starts real servers, as processes, for tests."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'loop' %}{{ range(10**9) | list }}"
    "{% elif m.role == 'pirate' %}{{ raise_exception('a strange role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ suffix }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_model(golden: Path, directory: Path) -> Path:
    """A copy of a golden model, with a chat template."""
    model = directory / "model"
    shutil.copytree(golden / "llama_bias", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


class Running:
    """A server's process and address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.log: list[str] = []
        # Read on, lest the server should wait for its log to be read.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def request(self, path, body=None, headers=None, method=None):
        """Status, headers and body of one request; `body` is bytes, or JSON to be."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def json(self, path, body=None, **options):
        """Status and parsed body."""
        status, _, data = self.request(path, body, **options)
        return status, json.loads(data)

    def metric(self, name):
        """One of the numbers of /metrics, without labels but the usual."""
        text = self.request("/metrics")[2].decode()
        return float(re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.M).group(1))

    def engine_pid(self):
        """The process that the server started for its engine."""
        (pid,) = engines_of(self.process.pid)
        return pid

    def wait(self):
        """The exit status, and all that the server wrote."""
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        return status, "".join(self.log)


def engines_of(parent: int) -> list[int]:
    """The engines' processes that a process started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            ppid = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and b"engine_loop" in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found


@contextlib.contextmanager
def serving(model, *options, device="cpu", env=None):
    """A server on a free port; ended at the end, if it has not by then."""
    command = [
        sys.executable, "-m", "tinyvllm", "serve", str(model), "--device", device, "--port", "0",
        "--max-num-batched-tokens", "1024", *map(str, options),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r" on (http://\S+) ", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield Running(process, found.group(1))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
