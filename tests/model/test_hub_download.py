"""Downloads from a hub on this machine: revisions, the cache, offline mode, refusals, time-outs."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
COMMITS = {"main": "a" * 40, "old": "b" * 40}
# Prints the model's directory and a value of its configuration, or the InputError.
SCRIPT = """
import sys
from tinyvllm.model import hub
from tinyvllm.util import InputError
hub._HUB_TIMEOUT_S = 0.5
try:
    model = hub.resolve_model(sys.argv[1], revision=sys.argv[2] or None)
    print(model.path, model.config.rope.theta, *sorted(p.name for p in model.path.iterdir()))
except InputError as error:
    print("InputError", error)
"""


class Hub(http.server.ThreadingHTTPServer):
    """Serves the model org/name with the files of a directory, in two revisions."""

    daemon_threads = True

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        self.refusal: tuple[int, str] | None = None  # status and error code of every answer
        self.silent_s = 0.0  # how long every answer fails to come
        self.token: str | None = None  # the only one that may read
        names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
        files = {n: (model / n).read_bytes() for n in names}
        files |= {"chat_template.jinja": b"{{ messages }}", "pytorch_model.bin": b"never loaded"}
        old = {**json.loads(files["config.json"]), "rope_theta": 5.0}
        self.files = {
            COMMITS["main"]: files,
            COMMITS["old"]: {**files, "config.json": json.dumps(old).encode()},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, path = self.server, unquote(urlsplit(self.path).path)
        server.requests.append(path)
        if server.silent_s:
            return time.sleep(server.silent_s)
        if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
            return self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
        if server.refusal:
            return self.answer(server.refusal[0], b"", {"X-Error-Code": server.refusal[1]})
        prefix, _, rest = path.partition("org/name")
        kind, _, rest = rest.lstrip("/").partition("/")
        revision, _, name = (rest or "main").partition("/")
        commit = COMMITS.get(revision, revision)
        if commit not in server.files:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = server.files[commit]
        if kind == "resolve":
            etag = f'"{sha1(files[name]).hexdigest()}"'
            return self.answer(200, files[name], {"ETag": etag, "X-Repo-Commit": commit})
        assert prefix == "/api/models/", path
        if kind == "tree":
            entries: Any = [
                {"type": "file", "path": n, "size": len(d), "oid": sha1(d).hexdigest()}
                for n, d in files.items()
            ]
        else:
            siblings = [{"rfilename": n} for n in files]
            entries = {"id": "org/name", "sha": commit, "siblings": siblings}
        return self.answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(golden: Path) -> Iterator[Hub]:
    server = Hub(golden / "mistral")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def resolve(hub: Hub, tmp_path: Path) -> Any:
    """Resolves org/name in a new process, since the hub's library reads its settings at import."""

    def run(revision: str = "", **variables: str) -> str:
        inherited = {k: v for k, v in os.environ.items() if not k.upper().startswith("HF_")}
        env = {
            **inherited,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **variables,
        }
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, "org/name", revision],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run


def test_download_then_offline(hub: Hub, resolve: Any) -> None:
    path, theta, *files = resolve().split()
    assert Path(path).name == COMMITS["main"] and theta != "5.0"
    assert files == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    hub.requests.clear()
    assert resolve(HF_HUB_OFFLINE="1").split()[0] == path
    assert resolve("old", HF_HUB_OFFLINE="1").startswith(
        "InputError model='org/name', revision='old': not, or not wholly, in the hub's cache"
    )
    assert hub.requests == []


def test_revision(hub: Hub, resolve: Any) -> None:
    path, theta, *_ = resolve("old").split()
    assert Path(path).name == COMMITS["old"] and theta == "5.0"
    message = resolve("none")
    assert message.endswith("revision='none': the model has no such branch, tag or commit")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "the model is gated: accept its licence at http://127"),
        (401, "RepoNotFound", "the hub has no such model, or it is private"),
        (404, "RepoNotFound", "the hub has no such model, or it is private"),
        (418, "", "cannot be had from the hub: "),
    ],
)
def test_refusals(hub: Hub, resolve: Any, status: int, code: str, message: str) -> None:
    hub.refusal = status, code
    assert resolve().startswith(f"InputError model='org/name': {message}")


def test_token(hub: Hub, resolve: Any) -> None:
    hub.token = "hf_right"
    assert "the model is gated" in resolve(HF_TOKEN="hf_wrong")
    assert Path(resolve(HF_TOKEN="hf_right").split()[0]).name == COMMITS["main"]


def test_timeout(hub: Hub, resolve: Any) -> None:
    hub.silent_s = 5.0
    start = time.monotonic()
    assert re.search("cannot be had from the hub: .*timed out", resolve())
    assert len(hub.requests) == 1 and time.monotonic() - start < 4.5
