"""The server with its engine on a GPU."""

import base64
import json
import os
import signal

import pytest
from serving import serving

pytestmark = pytest.mark.gpu
BODY = {"prompt": [1, 2, 3, 4], "temperature": 0, "max_tokens": 64, "ignore_eos": True}


def text_of(events):
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_streamed_is_not_streamed_and_the_engine_ends_with_the_server():
    sizes = ["--max-model-len", 4096, "--max-num-seqs", 16]
    model = ["llama-3.2-1b", "--load-format", "dummy", *sizes]
    with serving(*model, device="cuda") as server:
        status, whole = server.json("/v1/completions", BODY)
        assert status == 200 and whole["usage"]["completion_tokens"] == 64
        _, _, events = server.request("/v1/completions", BODY | {"stream": True})
        assert text_of(events) == whole["choices"][0]["text"]
        assert server.metric("tinyvllm:kv_blocks_used") == 0
        status, frame = server.json("/dashboard/data")
        stats, cells = frame["stats"], base64.b64decode(frame["cells"])
        assert status == 200 and len(cells) == 2 * stats["kv_blocks_total"]
        assert cells.count(1) == stats["kv_blocks_cached"] and set(cells) == {0, 1}
        assert stats["pool_used"] <= stats["pool_reserved"] <= stats["pool_budget"]
        server.process.send_signal(signal.SIGTERM)
        status, log = server.wait()
        assert status == 0 and "Traceback" not in log
    # All memory is free again: the next server gets as many blocks.
    with serving(*model, device="cuda") as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.wait()[0] == 1
