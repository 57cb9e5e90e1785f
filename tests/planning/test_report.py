"""The numbers of `tinyvllm plan` for the reference model, from the configuration alone."""

import json

import pytest

from tinyvllm.bench.lengths import Lengths
from tinyvllm.config import EngineConfig
from tinyvllm.driver.devices import DEVICES_BY_NAME
from tinyvllm.model.presets import PRESETS
from tinyvllm.planning.report import decode_buckets, plan_report
from tinyvllm.planning.text import buffers_text, report_text
from tinyvllm.util import InputError

GIB = 1 << 30


def report(free_gib=140, **options):
    config = EngineConfig(model="llama-3.2-1b", **options)
    model, device = PRESETS["llama-3.2-1b"], DEVICES_BY_NAME["H200"]
    return plan_report(config, "the model", model, device, int(free_gib * GIB), [Lengths(100, 100)])


@pytest.fixture(scope="module")
def large():
    return report()


def buffers(report, name):
    return [b for b in report.buffers if b.program.name == name]


def test_every_program_needs_hardly_more_than_its_live_buffers(large):
    (prefill,) = buffers(large, "prefill.plain")
    assert prefill.tokens == large.config.max_num_batched_tokens
    assert [b.rows for b in buffers(large, "decode.plain")] == decode_buckets(
        large.config.max_num_seqs
    )
    assert decode_buckets(20) == [1, 2, 4, 8, 16, 20]
    for b in large.buffers:
        assert b.ratio <= 1.05, b.title
        assert b.layers_agree and b.num_layers == 16, b.title
        assert b.plan.bytes_without_reuse > 1.9 * b.plan.arena_bytes, b.title


def test_a_layer_elsewhere_is_seen(large):
    (prefill,) = buffers(large, "prefill.plain")
    prefill.plan.offsets["layer7.q"] += 256
    try:
        assert not prefill.layers_agree
    finally:
        prefill.plan.offsets["layer7.q"] -= 256


def test_the_feed_forward_part_takes_over_the_norms_memory(large):
    (prefill,) = buffers(large, "prefill.plain")
    assert "silu_mul" in prefill.heirs("layer0.input_layernorm")
    assert prefill.heirs("layer0.post_attention_layernorm") == ["x"], "what down_proj writes"
    line = next(
        line for line in buffers_text(prefill).splitlines() if "layer0.input_layernorm" in line
    )
    assert line.endswith("attention, silu_mul")


def test_tokens_and_sequences_that_fit(large):
    assert large.token_bytes == 32 << 10
    assert large.kv_tokens == large.memory.num_blocks * 16 > 2_000_000
    (row,) = [w for w in large.waste if w.block_size == 16]
    assert row.sequences == large.memory.num_blocks // 13, "200 tokens fill 13 blocks"
    text = report_text(large, "one request")
    assert f"fits: {large.kv_tokens} tokens of K and V, 32.00 KiB each" in text
    assert f"{large.kv_tokens // 131072} sequences of max_model_len=131072" in text


def test_what_does_not_fit_says_what_to_change():
    small = report(3, max_model_len=131072)
    assert small.memory is None and small.kv_tokens == 0
    text = report_text(small, "one request")
    assert "does not fit" in text and "Raise gpu_memory_utilization (now 0.75)" in text
    assert "are missing" in text


def test_json_is_complete_and_plain(large):
    values = json.loads(json.dumps(large.as_json(), allow_nan=False))
    assert values["fits"] and values["memory"]["kv"] == large.memory.kv
    assert len(values["programs"]) == len(large.buffers)
    assert all(p["ratio"] <= 1.05 and p["layers_agree"] for p in values["programs"])
    assert values["options"]["block_size"] == 16


def test_a_context_that_the_model_does_not_have_is_an_error():
    with pytest.raises(InputError, match="max_model_len=131073"):
        report(max_model_len=131073)
