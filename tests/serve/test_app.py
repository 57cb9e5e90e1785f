"""The other endpoints: models, tokens, health, version, metrics, and what no endpoint takes."""

import json

import pytest

import tinyvllm


def test_models_are_listed_with_all_their_names(client):
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "org/tiny"]
    assert cards[0].max_model_len == 2048
    assert client.models.retrieve("org/tiny").id == "org/tiny"


def test_an_unknown_model_is_404(server):
    status, error = server.json("/v1/models/none")
    assert status == 404 and error["error"]["code"] == "model_not_found"


def test_tokens_and_back(server):
    text = "abab é <s>"
    status, found = server.json("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["token_strs"][:4] == ["a", "b", "a", "b"]
    assert found["max_model_len"] == 2048
    assert server.json("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": text})
    assert server.json("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "either prompt or messages"),
        ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
        ("/detokenize", {"tokens": [512]}, "from 0 to 511"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 2049}, "at most 2048"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_bad_tokens_are_400(server, path, body, message):
    status, error = server.json(path, body)
    assert status == 400 and message in error["error"]["message"]


def test_health_and_version(server):
    assert server.request("/health")[0] == 200
    assert server.json("/version") == (200, {"version": tinyvllm.__version__})


def test_paths_and_methods_that_are_not_there(server):
    for path, body, expected in (
        ("/v1/embeddings", {}, 404),
        ("/", None, 404),
        ("/v1/completions/", {}, 404),
        ("/v1/completions", None, 405),
        ("/health", {}, 405),
    ):
        status, error = server.json(path, body)
        assert (status, set(error["error"])) == (expected, {"message", "type", "param", "code"})


def test_other_sites_may_not_read_or_send(server):
    """No CORS headers, and a body that a page may send without asking is not taken."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Origin": "https://example.com", "Content-Type": kind}
        status, sent, data = server.request("/v1/completions", b'{"prompt": "ab"}', headers)
        assert status == 400 and "Content-Type" in json.loads(data)["error"]["message"]
        assert not any(name.lower().startswith("access-control") for name in sent)
    assert server.request("/v1/models", None, headers, method="OPTIONS")[0] == 405


def test_metrics_have_the_names_and_meanings_of_vllm(server, client):
    def read():
        names = (
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:time_to_first_token_seconds_count",
            "vllm:inter_token_latency_seconds_count",
            "vllm:e2e_request_latency_seconds_count",
            "vllm:request_prompt_tokens_sum",
            "vllm:request_generation_tokens_sum",
            "vllm:request_max_num_generation_tokens_sum",
            "vllm:request_queue_time_seconds_count",
            "vllm:request_prefill_time_seconds_count",
            "vllm:request_decode_time_seconds_count",
        )
        return [server.metric(name) for name in names]

    before = read()
    client.completions.create(
        model="tiny", prompt="abc", max_tokens=5, n=2, extra_body={"ignore_eos": True}
    )
    assert [b - a for a, b in zip(before, read(), strict=True)] == [
        3, 10, 1, 8, 1, 3, 10, 5, 1, 1, 1,
    ]  # fmt: skip
    parts = ["queue", "prefill", "decode"]
    total = sum(server.metric(f"vllm:request_{part}_time_seconds_sum") for part in parts)
    assert total == pytest.approx(server.metric("vllm:e2e_request_latency_seconds_sum"), rel=0.01)
    text = server.request("/metrics")[2].decode()
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}' in text
    )
    assert server.metric("tinyvllm:kv_blocks_free") > 0
    assert 0 <= server.metric("vllm:kv_cache_usage_perc") <= 1
