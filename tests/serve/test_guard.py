"""The key, and the limits of body, time and number."""

import http.client
import json
import socket
import threading
import time

import pytest
from serving import serving

KEY = "s3cret-key"
LIMITS = ["--max-body-bytes", 5000, "--body-timeout", 0.5, "--max-num-seqs", 2]


@pytest.fixture(scope="module")
def guarded(model):
    with serving(
        model,
        *LIMITS,
        "--max-waiting-requests",
        1,
        "--request-timeout",
        3,
        env={"TINYVLLM_API_KEY": KEY},
    ) as running:
        yield running
        # Whatever was asked, the key was never written.
        running.process.terminate()
        assert KEY not in running.wait()[1]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), bearer(KEY + "x"), bearer(""), {"Authorization": KEY}]
)
def test_without_the_key_nobody_gets_in(guarded, headers):
    for path, body in (("/v1/models", None), ("/v1/completions", {"prompt": "a"}), ("/docs", None)):
        status, answer, data = guarded.request(path, body, headers)
        assert status == 401 and answer["WWW-Authenticate"] == "Bearer"
        assert json.loads(data)["error"]["code"] == "invalid_api_key"


def test_with_the_key_they_do_and_probes_need_none(guarded):
    assert guarded.request("/v1/models", headers=bearer(KEY))[0] == 200
    assert guarded.request("/v1/models", headers={"authorization": f"bearer {KEY}"})[0] == 200
    for path in ("/health", "/version", "/metrics"):
        assert guarded.request(path)[0] == 200


def test_a_body_too_large_is_413(guarded):
    status, _, data = guarded.request("/v1/completions", {"prompt": "a" * 6000}, bearer(KEY))
    assert status == 413 and "max_body_bytes=5000" in json.loads(data)["error"]["message"]


def test_a_body_too_large_in_chunks_is_413(guarded):
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    connection.request(
        "POST", "/v1/completions", iter([b"x" * 1000] * 9), bearer(KEY), encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_does_not_come_is_408(guarded):
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=30) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n{"
        )
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


LONG = {"prompt": "ab", "max_tokens": 2000, "ignore_eos": True}


def test_a_queue_too_long_is_429_with_a_time_to_come_back(guarded):
    answers = []

    def ask(body):
        answers.append(guarded.request("/v1/completions", body, bearer(KEY)))

    threads = [threading.Thread(target=ask, args=(LONG,)) for _ in range(3)]  # 2 run, 1 waits
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while guarded.metric("vllm:request_params_n_count") < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    status, headers, data = guarded.request("/v1/completions", LONG, bearer(KEY))
    assert status == 429 and int(headers["Retry-After"]) >= 1
    assert json.loads(data)["error"]["code"] == "queue_full"
    for thread in threads:
        thread.join()
    # The other limit: these take longer than they may.
    assert [status for status, _, _ in answers] == [504] * 3
    assert guarded.request("/v1/completions", {"prompt": "a"}, bearer(KEY))[0] == 200


def test_more_sequences_than_could_ever_wait_are_400(guarded):
    status, _, data = guarded.request("/v1/completions", {"prompt": "a", "n": 4}, bearer(KEY))
    assert status == 400 and "at most 3 sequences" in json.loads(data)["error"]["message"]
