"""The benchmark of the server, on the CPU: it runs, and its numbers belong together."""

import json

from tinyvllm.cli.main import main


def test_bench_serve_measures_everything(golden, capsys):
    argv = ["--model", str(golden / "llama_bias"), "--load-format", "auto", "--device", "cpu"]
    sizes = ["--clients", "1", "4", "--output-len", "150", "--prompt-len", "8"]
    firsts = ["--first-token-clients", "2", "--first-token-requests", "3"]
    small = ["--max-num-batched-tokens", "512", "--starts", "1", "--json"]
    assert main(["bench", "serve", *argv, *sizes, *firsts, *small]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["starts_s"]) == 1 and result["starts_s"][0] > 0
    assert [row["clients"] for row in result["steps"]] == [1, 4]
    for row in result["steps"]:
        assert row["step_alone_ms"] > 0
        assert 0 <= row["events_per_s"] <= 1.5 * row["tokens_per_s"] + 20
    (first,) = result["first_tokens"]
    assert first["requests"] == 6 and 0 < first["p50_ms"] <= first["p99_ms"]
