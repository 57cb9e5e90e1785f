import json

import pytest
from running import run_example
from serving import chat_model

from tinyvllm import LLM, SamplingParams


@pytest.fixture
def model(golden, tmp_path):
    return chat_model(golden, tmp_path)


def batch(model, *paths):
    return run_example("offline_batch", *paths, "--model", model, "--device", "cpu")


def test_a_batch_is_completed_and_resumed(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    greedy = {"temperature": 0, "max_tokens": 6}
    records = [{"id": i, "prompt": "ab" * (i + 1), **greedy} for i in range(4)]
    records.append({"id": "chat", "messages": [{"role": "user", "content": "hi"}], **greedy})
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    # As a run leaves it that was stopped in the middle of a line.
    target.write_text('{"id": 1, "text": "kept"}\n{"id": 2, "te')
    result = batch(model, source, target)
    assert result.returncode == 0 and "1 done, 4 to do" in result.stderr, result.stderr
    texts = {x["id"]: x["text"] for x in map(json.loads, target.read_text().splitlines())}
    with LLM(str(model), device="cpu") as llm:
        params = SamplingParams(**greedy)
        outputs = llm.generate([r["prompt"] for r in records[:4]], params)
        expected = {r["id"]: o.outputs[0].text for r, o in zip(records, outputs, strict=False)}
        expected["chat"] = llm.chat(records[4]["messages"], params)[0].outputs[0].text
    assert texts == expected | {1: "kept"}
    again = batch(model, source, target)
    assert again.returncode == 0 and "5 done, 0 to do" in again.stderr
    assert len(target.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"prompt": "a"}', "line 1"),
        ('{"id": 1, "prompt": "a", "colour": 1}', "colour"),
        ('{"id": 1, "prompt": "a", "temperature": -1}', "temperature=-1"),
        ('{"id": 1}', "prompt"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "comes twice"),
    ],
)
def test_a_bad_record_is_named(model, tmp_path, line, message):
    source = tmp_path / "in.jsonl"
    source.write_text(line + "\n")
    result = batch(model, source, tmp_path / "out.jsonl")
    assert result.returncode == 1 and message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
