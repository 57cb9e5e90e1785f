"""A tiny GGUF file made here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest


def byte_tokens() -> list[str]:
    """Byte-level BPE's 256 characters for bytes, in the order of the bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]


TINY_SPECIAL = ["<unk>", "<s>", "</s>", "<|eot_id|>"]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a one-layer Llama as GGUF; keyword arguments change tensors (None drops one)."""

    def write(
        tensors: dict[str, np.ndarray | None] | None = None,
        quantize: dict[str, gguf.GGMLQuantizationType] | None = None,
        change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
        pre: str = "smollm",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("Tiny")
        writer.add_vocab_size(262)
        writer.add_block_count(1)
        writer.add_context_length(512)
        writer.add_embedding_length(128)
        writer.add_feed_forward_length(64)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(64)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        tokens = [*TINY_SPECIAL, *byte_tokens(), "he", "hel"]
        writer.add_token_list(tokens)
        types = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * 258
        writer.add_token_types([int(t) for t in types])
        writer.add_token_merges(["h e", "he l"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        change(writer)
        values: dict[str, Any] = {**tiny_tensors(), **(tensors or {})}
        for name, array in values.items():
            if array is None:
                continue
            quantization = (quantize or {}).get(name)
            if quantization is not None:
                array = gguf.quantize(array, quantization)
            writer.add_tensor(name, array, raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def tiny_tensors() -> dict[str, np.ndarray]:
    """The tensors of the tiny model, float32, by their GGUF names."""
    shapes = {
        "token_embd.weight": (262, 128),
        "output_norm.weight": (128,),
        "blk.0.attn_norm.weight": (128,),
        "blk.0.ffn_norm.weight": (128,),
        "blk.0.attn_q.weight": (128, 128),
        "blk.0.attn_k.weight": (64, 128),
        "blk.0.attn_v.weight": (64, 128),
        "blk.0.attn_output.weight": (128, 128),
        "blk.0.ffn_gate.weight": (64, 128),
        "blk.0.ffn_up.weight": (64, 128),
        "blk.0.ffn_down.weight": (128, 64),
    }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
