"""Hostile requests get proper errors, soon, and the server lives on."""

import http.client
import json
import socket
import time

import pytest

DEEP = b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
MANY = json.dumps({f"field{i}": i for i in range(100_000)}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"\xff\xfe{}",
        b"\x00",
        b'{"prompt": "a", "prompt": 5}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "seed": -1}',
        b'{"prompt": "a", "top_k": 1e3}',
        b'{"prompt": "a", "stop": [""]}',
        b'{"prompt": "a", "stop": {}}',
        b'{"prompt": "a", "logit_bias": [1]}',
        b'{"prompt": "a", "stream": "yes"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": [[]]}',
        b'{"prompt": [true]}',
        b'{"prompt": [1.5, 2]}',
        b'{"prompt": ["a", 1]}',
        b'{"prompt": [-1]}',
        DEEP,
        MANY,
        json.dumps({"prompt": [1.5] * 500_000}).encode(),
        json.dumps({"prompt": ["a"] * 500_000}).encode(),
        json.dumps({"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}}).encode(),
        json.dumps({"prompt": "a", "stop": ["x"] * 100_000}).encode(),
        json.dumps({"prompt": "a", "stop": "x" * 100_000}).encode(),
        json.dumps({"prompt": "a", "bad_words": ["x"] * 100_000}).encode(),
        json.dumps({"prompt": "a", "bad_words": ["x" * 100_000]}).encode(),
        json.dumps({"prompt": "a", "stop_token_ids": [1] * 100_000}).encode(),
    ],
    ids=lambda body: body[:50].decode(errors="replace"),
)
def test_a_bad_body_is_400(server, body):
    start = time.monotonic()
    status, headers, data = server.request("/v1/completions", body)
    error = json.loads(data)["error"]
    known_model = b"model" not in body
    assert status == (400 if known_model else 404)
    assert headers["Content-Type"] == "application/json"
    assert error["type"] and 0 < len(error["message"]) <= 1000
    assert time.monotonic() - start < 10
    assert server.request("/health")[0] == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body must be a JSON object"),
        (b"[]", "the body must be a JSON object"),
        (b"{}", "prompt: Field required"),
        (b"{", "the body is not JSON: Expecting property name"),
        (b'{"prompt": "\xff"}', "the body is not JSON: 'utf-8' codec can't decode"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON: Exceeds the lim"),
        (b'{"prompt": [' + b"[1]," * 20_000 + b"[1]]}", "should have at most 16384 items"),
        (DEEP, "the body is not JSON: maximum recursion depth exceeded"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_body_is_told_what_is_wrong_with_it(server, body, message):
    status, _, data = server.request("/v1/completions", body)
    assert status == 400 and message in json.loads(data)["error"]["message"]


def test_odd_texts_are_served(client):
    for text in ("\0", "\u202e" * 50, "e" + "\u0301" * 500, "\U0010ffff", "a\r\nb", "data: [DONE]"):
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=2, echo=True)
        assert answer.choices[0].text.startswith(text)
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], max_tokens=2
        )
        assert chat.choices


def test_a_template_that_fails_is_400(server):
    body = {"messages": [{"role": "loop", "content": "x"}]}
    status, error = server.json("/v1/chat/completions", body)
    assert status == 400 and "the chat template fails" in error["error"]["message"]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert server.json("/v1/chat/completions", body)[0] == 200


def test_variables_of_any_name_reach_the_template(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    body["chat_template_kwargs"] = {"self": 1, "name": 2, "": 3}
    assert server.json("/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 50_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_does_no_harm(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        try:
            raw.sendall(data)
            raw.recv(1000)
        except (ConnectionError, TimeoutError):
            pass
    assert server.request("/health")[0] == 200


def test_a_body_cut_short_does_no_harm(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b'{"prompt": ')
    connection.close()
    assert server.request("/health")[0] == 200
