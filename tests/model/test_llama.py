"""The whole model: every lowering gives the primitive program's results, with packed weights."""

import dataclasses

import numpy as np
import pytest

from tinyvllm.model.config import ModelConfig, RopeConfig
from tinyvllm.model.llama import logprobs_program, score_program, step_program
from tinyvllm.ops.lower import lower
from tinyvllm.ops.numpy_executor import NumpyExecutor
from tinyvllm.ops.program import STATE, concrete
from tinyvllm.util import DType


def kinds(program):
    return [op.kind for op in program.ops]


def llama(**options):
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        dtype=DType.BF16,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return dataclasses.replace(config, **options)


def run_steps(program, weights, limits):
    """A step with two prompts, one of them begun, then one that also decodes the first."""
    states = {
        b.name: np.zeros(concrete(b.shape, limits), b.dtype.storage if b.dtype else np.float32)
        for b in program.of_kind(STATE)
    }
    states["kv_cache"][:] = np.nan
    executor = NumpyExecutor([program], weights, states, limits, poison=True)

    def step(prompts, decodes, joins, blocks, samples, dims):
        ids = [-1] * decodes + [i for _, prompt in prompts for i in prompt]
        lengths = [1] * decodes + [len(prompt) for _, prompt in prompts]
        rows = [0] * decodes + [slot for slot, _ in prompts]
        inputs = {
            "edit_counts": [len(joins), len(blocks)],
            "row_edits": np.reshape([[s, 0, 0, 0, 0, 0, 0, 0] for s in joins], (-1, 8)),
            "block_edits": np.reshape(blocks, (-1, 4)),
            "batch_slots": rows,
            "query_start": np.cumsum([0, *lengths]),
            "sample_rows": samples,
            "prompt_ids": ids,
        }
        sizes = {
            "T": len(ids),
            "R": len(rows),
            "R1": len(rows) + 1,
            "S": len(samples),
            "D": decodes,
            "Q": 8,
            "C": 32,
            **dims,
        }
        arrays = {n: np.array(v, np.int32) for n, v in inputs.items()}
        outputs = ("logits", "tokens", "hidden")
        return executor.run(program.name, sizes, arrays, outputs).get()

    first = step(
        [(0, [5, 9, 1, 96, 33]), (1, [7, 7, 2])], 0, [0, 1], [(0, 0, 0, 3), (0, 1, 0, 1)], [0], {}
    )
    second = step([(1, [8, 0, 4, 11, 23, 50])], 1, [], [(0, 1, 1, 0)], [0, 1], {})
    return [first, second], states


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 3, "head_dim": 128, "mlp_bias": True},
    ],
)
def test_lowered_model_equals_the_primitive_one(phase, options):
    config = llama(**options)
    program = step_program(config, "step", block_size=8)
    lowered = lower(program, phase)
    rng = np.random.default_rng(2)
    weights = {
        w.name: rng.standard_normal(w.shape, np.float32) / np.sqrt(w.shape[-1])
        for w in program.weights.values()
    }
    weights |= {name: 1 + w for name, w in weights.items() if name.endswith("norm.weight")}
    limits = {
        "T": 12,
        "R": 4,
        "R1": 5,
        "S": 4,
        "D": 4,
        "Q": 16,
        "C": 64,
        "SLOTS": 4,
        "MB": 4,
        "NB": 6,
        "E": 4,
        "B": 8,
    }
    want, want_states = run_steps(program, weights, limits)
    have, have_states = run_steps(lowered, weights, limits)
    assert np.isfinite(want[1]["logits"]).all()
    for before, after in zip(want, have, strict=True):
        assert before["logits"].std() > 0.1
        np.testing.assert_array_equal(after["tokens"], before["tokens"])
        for name in ("logits", "hidden"):
            scale = np.abs(before[name]).max()
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-5 * scale)
    for name, state in want_states.items():
        np.testing.assert_allclose(have_states[name], state, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("bias", [False, True])
def test_llama_layers_become_the_fused_ops(bias):
    program = step_program(llama(attention_bias=bias, mlp_bias=bias), "step", block_size=8)
    tail = ["select_rows", "rms_norm", "matmul", "sample", "advance_rows"]
    head = ["apply_edits", "step_inputs", "embedding"]
    layer = [
        "rms_norm",
        "matmul",
        "rope_kv_write",
        "attention",
        "matmul_add",
        "rms_norm",
        "matmul_silu_mul",
        "matmul_add",
    ]
    assert kinds(lower(program, "prefill")) == head + 3 * layer + tail
    layer = [
        "matmul",
        "rope_kv_write",
        "attention",
        "matmul",
        "add_rms_norm",
        "matmul_silu_mul",
        "matmul",
    ]
    decode = [*head, "rms_norm", *layer, "add_rms_norm", *layer, "add_rms_norm", *layer, "add"]
    assert kinds(lower(program, "decode")) == decode + tail
    assert kinds(lower(program, "primitive")) == kinds(program)


def test_all_phases_pack_weights_alike():
    """One copy of the weights serves every phase."""
    program = step_program(llama(attention_bias=True, mlp_bias=True), "step", block_size=8)
    prefill, decode = (lower(program, phase).weights for phase in ("prefill", "decode"))
    assert prefill == decode
    parts = sorted(part for weight in prefill.values() for part in weight.parts)
    assert parts == sorted(program.weights), "each tensor of the checkpoint in one place"


@pytest.mark.parametrize("make", [logprobs_program, score_program])
def test_programs_that_follow_need_only_weights_of_the_step(make):
    config = llama(tie_word_embeddings=False)
    step = lower(step_program(config, "step", block_size=8), "prefill")
    for name, weight in make(config, "follow").weights.items():
        assert step.weights[name] == weight
