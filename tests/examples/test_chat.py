from running import run_example
from serving import chat_model

from tinyvllm import LLM, SamplingParams


def test_every_line_is_answered_and_the_conversation_is_kept(golden, tmp_path):
    model = chat_model(golden, tmp_path)
    options = ["--model", model, "--device", "cpu", "--temperature", 0, "--max-tokens", 8]
    result = run_example("chat", *options, stdin="ab\ncd\n\nnot read\n")
    assert result.returncode == 0, result.stderr
    params, talk, expected = SamplingParams(temperature=0, max_tokens=8), [], ""
    with LLM(str(model), device="cpu") as llm:
        for line in ("ab", "cd"):
            talk.append({"role": "user", "content": line})
            text = llm.chat(talk, params)[0].outputs[0].text
            talk.append({"role": "assistant", "content": text})
            expected += text + "\n"
    assert result.stdout == expected
    assert result.stderr.count("You: ") == 3


def test_a_model_without_a_template_is_one_line(golden):
    result = run_example("chat", "--model", golden / "llama_bias", "--device", "cpu", stdin="a\n")
    assert result.returncode == 1 and "no chat template" in result.stderr
    assert "Traceback" not in result.stderr
