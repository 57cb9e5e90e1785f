"""The Llama family's forward pass (Llama, Mistral) as primitive ops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tinyvllm.ops.program import Program
from tinyvllm.util import DType

if TYPE_CHECKING:
    from tinyvllm.model.config import ModelConfig


def embed(p: Program, c: ModelConfig, out: str) -> str:
    """Row of the embedding for each token; returns `out`."""
    embedding = p.weight("model.embed_tokens.weight", c.vocab_size, c.hidden_size, split_axis=0)
    return p.emit("embedding", out, token_ids="token_ids", weight=embedding)


def decoder_layer(p: Program, c: ModelConfig, layer: int, x: str, out: str, out_kind: str) -> str:
    """x + attention(norm(x)), then that + mlp(norm(that)); returns `out`, of kind `out_kind`."""
    at, weights = f"layer{layer}.", f"model.layers.{layer}."
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    inv_freq = p.constant("rope.inv_freq", c.rope.inv_freq(c.head_dim))

    def norm(x: str, name: str) -> str:
        weight = p.weight(f"{weights}{name}.weight", c.hidden_size)
        return p.emit("rms_norm", f"{at}{name}", x=x, weight=weight, eps=c.rms_norm_eps)

    def linear(x: str, name: str, n: int, k: int, bias: bool, split_axis: int) -> str:
        w = p.weight(f"{weights}{name}.weight", n, k, split_axis=split_axis)
        # With rows split, every device has the whole output and the bias is added once.
        b = None
        if bias:
            b = p.weight(f"{weights}{name}.bias", n, split_axis=0 if split_axis == 0 else None)
        return p.emit("matmul", f"{at}{name.split('.')[1]}", x=x, weight=w, bias=b)

    h = norm(x, "input_layernorm")
    q = linear(h, "self_attn.q_proj", q_size, c.hidden_size, c.attention_bias, 0)
    k = linear(h, "self_attn.k_proj", kv_size, c.hidden_size, c.attention_bias, 0)
    v = linear(h, "self_attn.v_proj", kv_size, c.hidden_size, c.attention_bias, 0)
    q = p.emit("rope", f"{at}q", x=q, positions="positions", inv_freq=inv_freq, head_dim=c.head_dim)
    k = p.emit("rope", f"{at}k", x=k, positions="positions", inv_freq=inv_freq, head_dim=c.head_dim)
    p.emit(
        "kv_write",
        k=k,
        v=v,
        positions="positions",
        token_slots="token_slots",
        block_tables="block_tables",
        kv_cache="kv_cache",
        layer=layer,
        group=0,
    )
    a = p.emit(
        "attention",
        f"{at}attention",
        q=q,
        kv_cache="kv_cache",
        block_tables="block_tables",
        query_start="query_start",
        batch_slots="batch_slots",
        seq_lens="seq_lens",
        layer=layer,
        group=0,
        scale=1 / math.sqrt(c.head_dim),
    )
    o = linear(a, "self_attn.o_proj", c.hidden_size, q_size, c.attention_bias, 1)
    x = p.emit("add", f"{at}x_attention", a=x, b=o)

    h = norm(x, "post_attention_layernorm")
    gate = linear(h, "mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias, 0)
    up = linear(h, "mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias, 0)
    m = p.emit("silu_mul", f"{at}silu_mul", gate=gate, up=up)
    d = linear(m, "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias, 1)
    return p.emit("add", out, a=x, b=d, out_kind=out_kind)


def head(p: Program, c: ModelConfig, x: str, out: str, out_kind: str) -> str:
    """Final norm and vocabulary product: logits in float32 in `out`, which it returns."""
    norm = p.weight("model.norm.weight", c.hidden_size)
    h = p.emit("rms_norm", f"{out}.norm", x=x, weight=norm, eps=c.rms_norm_eps)
    name = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    weight = p.weight(name, c.vocab_size, c.hidden_size, split_axis=0)
    return p.emit("matmul", out, x=h, weight=weight, dtype=DType.F32, out_kind=out_kind)
