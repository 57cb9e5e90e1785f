"""The Llama family's forward pass (Llama, Mistral) as programs of primitive ops."""

from __future__ import annotations

import math

from tinyvllm.model.config import ModelConfig
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType

# Rows of this many int32 words describe one edit; `row_state.cu` lists the fields.
ROW_EDIT_WORDS = 8
BLOCK_EDIT_WORDS = 4


def step_program(config: ModelConfig, name: str, *, block_size: int) -> Program:
    """One step of the engine: edit the row state, run the layers, sample, advance the rows.

    Run-time sizes: T tokens, R rows and R1 = R + 1, S sampled rows; D, Q and C as in the
    attention op; SLOTS, MB, NB, E and B: row slots, table length, blocks, capacity of the edits.
    """
    p = Program(name)
    _declare_state(p, config, block_size)
    x = _step_inputs(p, config)
    for layer in range(config.num_hidden_layers):
        last = layer == config.num_hidden_layers - 1
        x = _decoder_layer(p, config, layer, x, OUTPUT if last else "temp")
    x = p.emit("select_rows", "sampled_x", x=x, index="sample_index")
    _head(p, config, x, "logits", OUTPUT)
    p.emit(
        "sample",
        "tokens",
        logits="logits",
        sample_slots="sample_slots",
        sample_positions="sample_positions",
        row_temperature="row_temperature",
        row_seed="row_seed",
        out_kind=OUTPUT,
    )
    p.emit(
        "advance_rows",
        batch_slots="batch_slots",
        seq_lens="seq_lens",
        sample_slots="sample_slots",
        tokens="tokens",
        row_position="row_position",
        row_token="row_token",
    )
    return p


def logprobs_program(config: ModelConfig, name: str) -> Program:
    """Log-probabilities of the tokens that the step just before has sampled."""
    p = Program(name)
    p.buffer("logits", ("S", config.vocab_size), DType.F32, EXTERNAL)
    p.buffer("tokens", ("S",), DType.I32, EXTERNAL)
    _logprobs(p, "S", "logits", "tokens")
    return p


def score_program(config: ModelConfig, name: str) -> Program:
    """Log-probabilities of given tokens after some of the positions of the step just before.

    N positions a run: `score_index` is the token's place in the step, `score_targets` the token
    that followed it.
    """
    p = Program(name)
    p.buffer("hidden", ("T", config.hidden_size), None, EXTERNAL)
    p.buffer("score_index", ("N",), DType.I32, INPUT)
    p.buffer("score_targets", ("N",), DType.I32, INPUT)
    x = p.emit("select_rows", "scored_x", x="hidden", index="score_index")
    _head(p, config, x, "score_logits", "temp")
    _logprobs(p, "N", "score_logits", "score_targets")
    return p


def _declare_state(p: Program, c: ModelConfig, block_size: int) -> None:
    """What lives on the device between steps: one row state per slot, and the KV cache."""
    p.buffer(
        "kv_cache",
        ("NB", c.num_hidden_layers, 2, c.num_key_value_heads, block_size, c.head_dim),
        None,
        STATE,
    )
    p.buffer("block_tables", (1, "SLOTS", "MB"), DType.I32, STATE)
    p.buffer("row_position", ("SLOTS",), DType.I32, STATE)
    p.buffer("row_token", ("SLOTS",), DType.I32, STATE)
    p.buffer("row_temperature", ("SLOTS",), DType.F32, STATE)
    p.buffer("row_seed", ("SLOTS", 2), DType.I32, STATE)


def _step_inputs(p: Program, c: ModelConfig) -> str:
    """Applies the host's edits, spreads the rows over the step's tokens, embeds them."""
    p.buffer("edit_counts", (2,), DType.I32, INPUT)
    p.buffer("row_edits", ("E", ROW_EDIT_WORDS), DType.I32, INPUT)
    p.buffer("batch_slots", ("R",), DType.I32, INPUT)
    p.buffer("query_start", ("R1",), DType.I32, INPUT)
    p.buffer("sample_rows", ("S",), DType.I32, INPUT)
    p.buffer("block_edits", ("B", BLOCK_EDIT_WORDS), DType.I32, INPUT)
    p.buffer("prompt_ids", ("T",), DType.I32, INPUT)
    p.emit(
        "apply_edits",
        edit_counts="edit_counts",
        row_edits="row_edits",
        block_edits="block_edits",
        row_position="row_position",
        row_token="row_token",
        row_temperature="row_temperature",
        row_seed="row_seed",
        block_tables="block_tables",
    )
    for name, size in (
        ("token_ids", "T"),
        ("positions", "T"),
        ("token_slots", "T"),
        ("seq_lens", "R"),
        ("sample_index", "S"),
        ("sample_slots", "S"),
        ("sample_positions", "S"),
    ):
        p.buffer(name, (size,), DType.I32)
    p.emit(
        "step_inputs",
        batch_slots="batch_slots",
        query_start="query_start",
        prompt_ids="prompt_ids",
        sample_rows="sample_rows",
        row_position="row_position",
        row_token="row_token",
        token_ids="token_ids",
        positions="positions",
        token_slots="token_slots",
        seq_lens="seq_lens",
        sample_index="sample_index",
        sample_slots="sample_slots",
        sample_positions="sample_positions",
    )
    embedding = p.weight("model.embed_tokens.weight", c.vocab_size, c.hidden_size, split_axis=0)
    return p.emit("embedding", "x", token_ids="token_ids", weight=embedding)


def _decoder_layer(p: Program, c: ModelConfig, layer: int, x: str, out_kind: str) -> str:
    """x + attention(norm(x)), then that + mlp(norm(that)); returns the layer's output."""
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
    name = "hidden" if out_kind == OUTPUT else f"{at}x"
    return p.emit("add", name, a=x, b=d, out_kind=out_kind)


def _head(p: Program, c: ModelConfig, x: str, out: str, out_kind: str) -> str:
    """Final norm and vocabulary product: logits in float32."""
    norm = p.weight("model.norm.weight", c.hidden_size)
    h = p.emit("rms_norm", f"{out}.norm", x=x, weight=norm, eps=c.rms_norm_eps)
    name = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    head = p.weight(name, c.vocab_size, c.hidden_size, split_axis=0)
    return p.emit("matmul", out, x=h, weight=head, dtype=DType.F32, out_kind=out_kind)


def _logprobs(p: Program, rows: str, logits: str, targets: str) -> None:
    """Log-probability and rank of the targets, and the P most likely tokens."""
    p.buffer("target_logprob", (rows,), DType.F32, OUTPUT)
    p.buffer("target_rank", (rows,), DType.I32, OUTPUT)
    p.buffer("top_ids", (rows, "P"), DType.I32, OUTPUT)
    p.buffer("top_logprobs", (rows, "P"), DType.F32, OUTPUT)
    p.emit(
        "logprobs",
        logits=logits,
        targets=targets,
        target_logprob="target_logprob",
        target_rank="target_rank",
        top_ids="top_ids",
        top_logprobs="top_logprobs",
    )
