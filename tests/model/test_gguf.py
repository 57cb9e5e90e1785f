"""GgufSource: names, dequantised values, Q and K in Hugging Face's order, configuration."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from tinyvllm.model.config import RopeConfig
from tinyvllm.model.gguf import GgufSource
from tinyvllm.model.gguf_file import GgufFile
from tinyvllm.util import DType, InputError

Writer = Callable[..., Path]


def read(source: GgufSource, name: str) -> np.ndarray:
    shape = source.shape(name)
    out = np.empty(int(np.prod(shape)), np.float32)
    source.read(name, DType.F32, out)
    return out.reshape(shape)


def interleaved(matrix: np.ndarray, head_dim: int = 64) -> np.ndarray:
    """Rows as llama.cpp stores them: row 2i is the i-th of a head's first half, 2i + 1 of its
    second half."""
    result = np.empty_like(matrix)
    for head in range(0, len(matrix), head_dim):
        for i in range(head_dim // 2):
            result[head + 2 * i] = matrix[head + i]
            result[head + 2 * i + 1] = matrix[head + head_dim // 2 + i]
    return result


def dequantized(file: GgufFile, name: str) -> np.ndarray:
    """Written from the formats' description, without the package: F32, Q8_0 and Q4_1."""
    tensor = file.tensors[name]
    count = tensor.size // tensor.block_size * tensor.block_bytes
    data = np.fromfile(file.path, np.uint8, count=count, offset=tensor.offset)
    if tensor.quantization.name == "F32":
        return data.view(np.float32).reshape(tensor.shape)
    blocks = data.reshape(-1, tensor.block_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if tensor.quantization.name == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(tensor.shape)
    assert tensor.quantization.name == "Q4_1"
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] % 16, blocks[:, 4:] // 16], axis=1)
    return (nibbles.astype(np.float32) * scale + least).reshape(tensor.shape)


def test_every_tensor_of_smollm2(smollm2_gguf: Path) -> None:
    file = GgufFile.parse(smollm2_gguf)
    source = GgufSource(file)
    assert len(source.names()) == 272 and "lm_head.weight" not in source.names()
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.3.attn_v.weight": "model.layers.3.self_attn.v_proj.weight",
        "blk.29.attn_output.weight": "model.layers.29.self_attn.o_proj.weight",
        "blk.29.ffn_norm.weight": "model.layers.29.post_attention_layernorm.weight",
        "blk.7.ffn_gate.weight": "model.layers.7.mlp.gate_proj.weight",
        "blk.7.ffn_up.weight": "model.layers.7.mlp.up_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
    }
    for theirs, ours in names.items():
        assert np.array_equal(read(source, ours), dequantized(file, theirs)), ours
    for layer, letter in ((0, "q"), (17, "k"), (29, "q")):
        matrix = read(source, f"model.layers.{layer}.self_attn.{letter}_proj.weight")
        expected = dequantized(file, f"blk.{layer}.attn_{letter}.weight")
        np.testing.assert_array_equal(interleaved(matrix), expected)
    source.close()


def test_smollm2_configuration(smollm2_gguf: Path) -> None:
    source = GgufSource(smollm2_gguf)
    config = source.model_config()
    source.close()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.intermediate_size == 1536 and config.head_dim == 64
    assert config.rope == RopeConfig(100000.0) and config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings and not config.attention_bias and not config.mlp_bias
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert config.max_context == 8192 and config.dtype is DType.BF16


@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_pieces_of_permuted_tensors(write_gguf: Writer, kind: str | None) -> None:
    """Any part of any tensor is that part of the whole, whatever blocks and heads it cuts."""
    quantize = {"blk.0.attn_q.weight": gguf.GGMLQuantizationType[kind]} if kind else {}
    source = GgufSource(write_gguf(quantize=quantize))
    rng = np.random.default_rng(2)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        whole = read(source, name).reshape(-1)
        for _ in range(20):
            start, end = sorted(rng.integers(0, whole.size + 1, 2).tolist())
            out = np.empty(end - start, np.uint16)
            source.read(name, DType.BF16, out, start)
            np.testing.assert_array_equal(out, DType.BF16.encode(whole[start:end]))
    source.close()


def test_threads_get_what_one_gets(smollm2_gguf: Path) -> None:
    source = GgufSource(smollm2_gguf)
    names = [n for n in source.names() if "layers.1." in n]
    alone = [read(source, n) for n in names]
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(alone, pool.map(lambda n: read(source, n), names), strict=True):
            np.testing.assert_array_equal(one, other)
    source.close()


def test_biases_are_permuted_too(write_gguf: Writer) -> None:
    bias = np.arange(128, dtype=np.float32)
    source = GgufSource(write_gguf({"blk.0.attn_q.bias": interleaved(bias)}))
    np.testing.assert_array_equal(read(source, "model.layers.0.self_attn.q_proj.bias"), bias)
    assert source.model_config().attention_bias
    source.close()


def rope_freqs(rope: RopeConfig) -> np.ndarray:
    return RopeConfig(rope.theta).inv_freq(64) / rope.inv_freq(64)


def test_llama3_scaling_from_its_tensor(write_gguf: Writer) -> None:
    rope = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    source = GgufSource(write_gguf({"rope_freqs.weight": rope_freqs(rope)}))
    found = source.model_config().rope
    assert found.kind == "llama3" and found.factor == pytest.approx(8.0)
    assert "rope_freqs.weight" not in source.names()
    np.testing.assert_allclose(found.inv_freq(64), rope.inv_freq(64), rtol=1e-6)
    source.close()
    other = RopeConfig(10000.0, "llama3", 8.0, 1.0, 2.0, 4096)
    with pytest.raises(InputError, match=r"not the scaling of Llama 3\.x"):
        GgufSource(write_gguf({"rope_freqs.weight": rope_freqs(other)}))
    with pytest.raises(InputError, match="must be F32"):
        GgufSource(write_gguf({"rope_freqs.weight": np.ones(31, np.float32)}))
    with pytest.raises(InputError, match=r"not the scaling of Llama 3\.x"):
        GgufSource(write_gguf({"rope_freqs.weight": np.full(32, np.nan, np.float32)}))


def test_linear_scaling_and_ends(write_gguf: Writer) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    source = GgufSource(write_gguf(change=change))
    assert source.model_config().rope == RopeConfig(10000.0, "linear", 4.0)
    assert source.model_config().eos_token_ids == (2, 3)  # </s>, <|eot_id|>
    source.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "yarn"),
        (lambda w: w.add_expert_count(8), "mixtures"),
        (lambda w: w.add_key_length(80), "head_dim=80"),
        (lambda w: w.add_value_length(32), "value_length=32"),
        (lambda w: w.add_string("llama.attention.sliding_window", "x"), "type str: must be int"),
        (lambda w: w.add_eos_token_id(999), "from 0 to 261"),
    ],
)
def test_refused_metadata(
    write_gguf: Writer, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        GgufSource(write_gguf(change=change))


def test_refused_tensors(write_gguf: Writer) -> None:
    rows = np.zeros((96, 128), np.float32)
    with pytest.raises(InputError, match=r"attn_q.*96 rows.*head_dim=64"):
        GgufSource(write_gguf({"blk.0.attn_q.weight": rows}))
    with pytest.raises(InputError, match="cannot dequantise"):
        GgufSource(write_gguf({"output_norm.weight": np.zeros(128, np.int32)}))
    source = GgufSource(write_gguf({"blk.0.surprise.weight": np.zeros(3, np.float32)}))
    assert "blk.0.surprise.weight" in source.names()  # left for the loader to refuse
    with pytest.raises(InputError, match="no tensor named"):
        source.shape("model.layers.9.mlp.up_proj.weight")
    source.close()
    source.close()
