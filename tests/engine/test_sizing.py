"""How an engine is sized; and dummy weights, made in the places that its programs give them."""

import dataclasses

import numpy as np
import pytest
from harness import pack

from tinyvllm.config import EngineConfig
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.engine.sizing import engine_programs, model_dtype, plan_engine, swap_space
from tinyvllm.model.config import ModelConfig, RopeConfig
from tinyvllm.model.presets import PRESETS, DummySource
from tinyvllm.model.weights import dummy_launches, load_numpy, packed_weights, place_weights
from tinyvllm.ops.random_fill import RANDOM_FILL, dummy_values
from tinyvllm.util import DType, InputError

H200 = DeviceInfo("H200", (9, 0), 132, 227 << 10, 141 << 30)
LLAMA = PRESETS["llama-3.2-1b"]
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=136,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    dtype=DType.BF16,
    bos_token_id=None,
    eos_token_ids=(),
)


def plan(free_gib, model=LLAMA, primitive=False, **options):
    config = EngineConfig(model="m", **options)
    programs = engine_programs(config, model, primitive)
    act = DType.F32 if primitive else DType.BF16
    return plan_engine(
        config,
        model,
        programs,
        free_bytes=int(free_gib * (1 << 30)),
        act=act,
        device=None if primitive else H200,
    )


def test_the_reference_model_on_a_large_gpu_gets_its_whole_context():
    memory, max_model_len = plan(139)
    assert max_model_len == LLAMA.max_position_embeddings
    assert memory.block_bytes == 512 << 10
    assert memory.weights == pytest.approx(1235814400 * 2, rel=1e-3)
    assert memory.unused >= 0
    assert memory.num_blocks > 100_000


def test_a_small_gpu_shortens_the_context_unless_it_was_asked_for():
    memory, max_model_len = plan(8)
    assert max_model_len == memory.num_blocks * 16 < LLAMA.max_position_embeddings
    memory, max_model_len = plan(8, max_model_len=4096, max_num_seqs=2)
    assert max_model_len == 4096
    assert memory.num_blocks == 2 * 256, "no more blocks than two sequences can use"
    with pytest.raises(InputError, match=r"does not fit: 8192 KV blocks are needed(.|\n)*weights"):
        plan(6, max_model_len=131072)
    with pytest.raises(InputError, match="weights alone exceed"):
        plan(2)


def test_num_gpu_blocks_override_is_taken_as_it_is():
    memory, max_model_len = plan(139, num_gpu_blocks_override=100)
    assert (memory.num_blocks, max_model_len) == (100, 1600)
    memory, max_model_len = plan(139, num_gpu_blocks_override=100_000, max_num_seqs=1)
    assert (memory.num_blocks, max_model_len) == (100_000, LLAMA.max_position_embeddings)
    memory, _ = plan(139, num_gpu_blocks_override=64, max_model_len=1024)
    assert memory.num_blocks == 64
    cpu, _ = plan(139, primitive=True, num_gpu_blocks_override=100)
    assert cpu.num_blocks == 100


def test_num_gpu_blocks_override_that_does_not_fit_is_an_error():
    message = r"num_gpu_blocks_override=63: .*max_model_len=1024 tokens needs 64 KV blocks"
    with pytest.raises(InputError, match=message):
        plan(139, num_gpu_blocks_override=63, max_model_len=1024)
    with pytest.raises(InputError, match=r"300000 KV blocks are needed(.|\n)*num_gpu_blocks_overr"):
        plan(139, num_gpu_blocks_override=300_000)


def test_lower_limits_need_less():
    large, _ = plan(139)
    small, _ = plan(139, max_num_batched_tokens=512, max_num_seqs=16)
    assert small.arenas < large.arenas / 10
    assert small.state < large.state / 10
    assert small.weights == large.weights
    assert plan(139, block_size=32)[0].block_bytes == 2 * large.block_bytes


def test_the_states_are_planned_to_the_byte():
    """Of three rows; by hand. Inputs are rounded up to 16 bytes each, states to 256."""
    inputs = [
        3 * 2 * 4 + 8,  # blocks to copy: from, to
        3 * 16 * 4,  # edits of rows
        2 * 4 + 8,  # their number, and that of edits of tables
        (3 + 3) * 4 * 4,  # the latter: three blocks for 40 tokens, and one begun by each row
        3 * 4 + 4,  # slots
        4 * 4,  # where the rows start, and the last one ends
        3 * 4 + 4,  # rows that sample
        40 * 4,  # tokens
        256 * 4,  # positions to score
        256 * 4,  # their tokens
    ]
    states = [
        *[256] * 4,  # 3 * 4 blocks, positions, tokens, parameters: less than 256 bytes each
        1280,  # 3 * 97 counts of tokens take 1164
        256,  # 3 * 8 latest tokens
        *[3 * 1024 * 4] * 3,  # biases: tokens, values, ends
        3 * 128 * 8 * 4,  # bad words
    ]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 64}
    assert plan(1, TINY, **options)[0].state == sum(inputs) + sum(states)
    assert plan(1, TINY, primitive=True, **options)[0].state == sum(inputs) + sum(states)


def test_the_cpu_plans_for_float32():
    cpu, _ = plan(139, primitive=True)
    gpu, _ = plan(139)
    assert cpu.block_bytes == 2 * gpu.block_bytes
    assert cpu.weights == 2 * gpu.weights


@pytest.mark.parametrize(
    ("option", "stored", "wanted"),
    [
        ("auto", DType.BF16, DType.BF16),
        ("auto", DType.FP16, DType.FP16),
        ("auto", DType.F32, DType.BF16),
        ("float16", DType.BF16, DType.FP16),
        ("bfloat16", DType.F32, DType.BF16),
    ],
)
def test_dtype_is_the_one_asked_for_or_the_checkpoints_16_bit_one(option, stored, wanted):
    model = dataclasses.replace(TINY, dtype=stored)
    assert model_dtype(EngineConfig(model="m", dtype=option), model) is wanted


def run_fill(launch, memory, base):
    """What random_fill_kernel does, by its arguments alone."""
    a = dict(zip([name for _, name in RANDOM_FILL.params], launch.args, strict=True))
    itemsize = memory.dtype.itemsize
    vec = int(launch.spec.template_args[1])
    row_len = a["row_vectors"] * vec
    num_rows, rest = divmod(a["num_vectors"], a["row_vectors"])
    assert rest == 0 and launch.grid[0] * launch.block * 4 >= a["num_vectors"]
    values = dummy_values(a["key"], 0, num_rows * row_len, a["base"], a["scale"])
    start, rest = divmod(a["dst"] - base, itemsize)
    assert rest == 0 and a["dst"] % (vec * itemsize) == 0
    for row in range(num_rows):
        place = row + row // a["group"] * a["group"] * (a["num_parts"] - 1)
        first = start + place * a["pitch"]
        piece = memory[first : first + row_len]
        assert not piece.any(), "written twice"
        piece[:] = DType.BF16.encode(values[row * row_len : (row + 1) * row_len])


def test_dummy_weights_made_in_place_are_those_of_the_cpu():
    source = DummySource(TINY)
    programs = engine_programs(EngineConfig(model="m"), TINY, primitive=False)
    packed = packed_weights(programs)
    base = 1 << 20
    arrays, num_bytes = place_weights(packed, DType.BF16, base)
    memory = np.zeros(num_bytes // 2, np.uint16)
    for launch in dummy_launches(source, packed, arrays):
        run_fill(launch, memory, base)
    primitive = engine_programs(EngineConfig(model="m"), TINY, primitive=True)[0]
    checkpoint = load_numpy(source, primitive, DType.BF16)
    for name, weight in packed.items():
        start = (arrays[name].ptr - base) // 2
        have = memory[start : start + arrays[name].size].reshape(weight.shape)
        want = DType.BF16.encode(pack(weight, checkpoint))
        np.testing.assert_array_equal(have, want, err_msg=name)
        assert len(np.unique(have)) > min(have.size, 200) // 4, f"{name} is nearly constant"


def test_the_swap_space_is_no_larger_than_the_host_memory(monkeypatch, caplog):
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.get)
    whole = swap_space(EngineConfig(model="m", swap_space=4), 1 << 20)
    assert whole.num_blocks == 4096 and not caplog.text
    clipped = swap_space(EngineConfig(model="m", swap_space=1 << 20), 1 << 20)
    assert clipped.num_blocks == 4096
    assert "swap_space=1048576: the host has 4.00 GiB" in caplog.text
    assert swap_space(EngineConfig(model="m", swap_space=0.0009), 1 << 20) is None
