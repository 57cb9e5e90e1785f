"""The whole model: every lowering gives the primitive program's results, with packed weights."""

import dataclasses

import numpy as np
import pytest

from tinyvllm.model.config import RopeConfig
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.ops.lower import lower
from tinyvllm.ops.numpy_executor import NumpyExecutor
from tinyvllm.ops.program import OUTPUT, STATE, concrete
from tinyvllm.ops.row_params import as_words, new_row_params
from tinyvllm.sampling_params import SAMPLERS


def kinds(program):
    return [op.kind for op in program.ops]


def llama(**options):
    small = dataclasses.replace(
        PRESETS["llama-3.2-1b"],
        vocab_size=97,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope=RopeConfig(),
    )
    return dataclasses.replace(small, **options)


LIMITS = {"T": 12, "R": 4, "R1": 5, "S": 4, "D": 4, "Q": 16, "C": 64, "SLOTS": 4, "MB": 4}
LIMITS |= {"NB": 6, "E": 4, "B": 8, "CP": 4}


def run_steps(program, weights, temperature=0.0):
    """A step with two prompts, one of them begun, then one that also decodes the first."""
    states = {
        b.name: np.zeros(concrete(b.shape, LIMITS), b.dtype.storage if b.dtype else np.float32)
        for b in program.of_kind(STATE)
    }
    states["kv_cache"][:] = np.nan
    executor = NumpyExecutor([program], weights, states, LIMITS, poison=True)

    def step(prompts, decodes, joins, blocks, samples, dims):
        ids = [-1] * decodes + [i for _, prompt in prompts for i in prompt]
        lengths = [1] * decodes + [len(prompt) for _, prompt in prompts]
        rows = [0] * decodes + [slot for slot, _ in prompts]
        edits = new_row_params(len(joins))
        edits["slot"], edits["temperature"] = joins, temperature
        inputs = {
            "edit_counts": [len(joins), len(blocks)],
            "row_edits": as_words(edits),
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
            "CP": 0,
            **dims,
        }
        arrays = {n: np.array(v, np.int32) for n, v in inputs.items()}
        outputs = [b.name for b in program.of_kind(OUTPUT)]
        return executor.run(program.name, sizes, arrays, outputs).get()

    first = step(
        [(0, [5, 9, 1, 96, 33]), (1, [7, 7, 2])], 0, [0, 1], [(0, 0, 0, 3), (0, 1, 0, 1)], [0], {}
    )
    second = step([(1, [8, 0, 4, 11, 23, 50])], 1, [], [(0, 1, 1, 0)], [0, 1], {})
    return [first, second], states


@pytest.mark.parametrize("sampler", ["plain", "filter"])
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
def test_lowered_model_equals_the_primitive_one(phase, options, sampler):
    config = llama(**options)
    program = step_program(config, "step", block_size=8, sampler=sampler)
    lowered = lower(program, phase)
    rng = np.random.default_rng(2)
    weights = {
        w.name: rng.standard_normal(w.shape, np.float32) / np.sqrt(w.shape[-1])
        for w in program.weights.values()
    }
    weights |= {name: 1 + w for name, w in weights.items() if name.endswith("norm.weight")}
    want, want_states = run_steps(program, weights)
    have, have_states = run_steps(lowered, weights)
    names = [name for name in ("hidden", "logits") if name in want[1]]
    assert len(names) == (1 if sampler == "plain" else 2)
    for before, after in zip(want, have, strict=True):
        np.testing.assert_array_equal(after["tokens"], before["tokens"])
        for name in names:
            assert np.isfinite(before[name]).all() and before[name].std() > 0.1
            scale = np.abs(before[name]).max()
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-5 * scale)
    for name, state in want_states.items():
        np.testing.assert_allclose(have_states[name], state, rtol=1e-4, atol=1e-5, err_msg=name)


SAMPLER_OPS = {  # that are not inside of the head's product
    "plain": [],
    "filter": ["sample"],
    "adjust": ["adjust_logits", "sample"],
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_llama_layers_become_the_fused_ops(bias, sampler):
    config = llama(attention_bias=bias, mlp_bias=bias)
    program, decode_program = (
        step_program(config, "step", block_size=8, sampler=sampler, phase=phase)
        for phase in ("prefill", "decode")
    )
    head_product = "matmul_sample" if sampler == "plain" else "matmul"
    tail = ["select_rows", "rms_norm", head_product, *SAMPLER_OPS[sampler], "advance_rows"]
    adjusts = sampler == "adjust"
    head = ["apply_edits", "copy_blocks", "step_inputs", "embedding"]
    head += ["reset_counts", "count_tokens"] * adjusts
    layer = [
        "rms_norm",
        "matmul_rope_kv_write",
        "attention",
        "matmul_add",
        "rms_norm",
        "matmul_silu_mul",
        "matmul_add",
    ]
    assert kinds(lower(program, "prefill")) == head + 3 * layer + tail
    layer = ["norm_matmul", "rope_attention", "matmul_add", "norm_matmul_silu_mul", "matmul_add"]
    tail[1:3] = [f"norm_{head_product}"]
    head = ["apply_edits", "step_inputs", "embedding"] + ["count_tokens"] * adjusts
    assert kinds(lower(decode_program, "decode")) == head + 3 * layer + tail
    assert kinds(lower(program, "primitive")) == kinds(program)


@pytest.mark.parametrize("sampler", ["filter", "adjust"])
def test_rows_that_ask_for_nothing_get_the_tokens_of_the_plain_sampler(sampler):
    config = llama()
    plain = step_program(config, "step", block_size=8)
    rng = np.random.default_rng(2)
    weights = {
        w.name: rng.standard_normal(w.shape, np.float32) / np.sqrt(w.shape[-1])
        for w in plain.weights.values()
    }
    want, _ = run_steps(plain, weights, temperature=1.5)
    have, states = run_steps(
        step_program(config, "step", block_size=8, sampler=sampler),
        weights,
        temperature=1.5,
    )
    for before, after in zip(want, have, strict=True):
        for name in ("hidden", "tokens"):
            np.testing.assert_array_equal(after[name], before[name])
    assert not states.get("token_counts", np.zeros(1)).any(), "no row is counted"


def test_all_phases_pack_weights_alike():
    """One copy of the weights serves every phase."""
    program = step_program(llama(attention_bias=True, mlp_bias=True), "step", block_size=8)
    prefill, decode = (lower(program, phase).weights for phase in ("prefill", "decode"))
    assert prefill == decode
    parts = sorted(part for weight in prefill.values() for part in weight.parts)
    assert parts == sorted(program.weights), "each tensor of the checkpoint in one place"
