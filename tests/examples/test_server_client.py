from running import run_example
from serving import chat_model, serving


def test_a_server_is_asked_with_the_official_client(golden, tmp_path):
    with serving(chat_model(golden, tmp_path)) as server:
        options = ["--base-url", server.url + "/v1", "--temperature", 0, "--max-tokens", 8]
        result = run_example("server_client", "ab", *options)
        assert result.returncode == 0, result.stderr
        body = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 8}
        _, chat = server.json("/v1/chat/completions", body)
        body = {"prompt": "ab", "temperature": 0, "max_tokens": 8, "top_k": 20}
        _, completion = server.json("/v1/completions", body | {"repetition_penalty": 1.1})
    texts = [chat["choices"][0]["message"]["content"], completion["choices"][0]["text"]]
    assert result.stdout == texts[0] + texts[1] + "\n"
    assert "mean log-probability -" in result.stderr
    refused = run_example("server_client", "ab", "--base-url", server.url + "/v1")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert f"{server.url}/v1/models" in refused.stderr and "`tinyvllm serve`" in refused.stderr
