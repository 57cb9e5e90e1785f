"""The programs of an engine: what stands around a model's layers in a step, and scoring."""

from __future__ import annotations

from typing import Any

from tinyvllm.model.config import ModelConfig
from tinyvllm.model.registry import ARCHITECTURES
from tinyvllm.ops.logit_adjust import BAD_WORD_WORDS, HISTORY
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, TEMP, Program
from tinyvllm.ops.row_params import ROW_WORDS
from tinyvllm.ops.row_state import BLOCK_EDIT_WORDS
from tinyvllm.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, SAMPLERS
from tinyvllm.util import DType

_LISTS = "row_bias_tokens row_bias_values row_bias_until row_bad_words"


def step_program(
    config: ModelConfig,
    name: str,
    *,
    block_size: int,
    sampler: str = "plain",
    phase: str = "prefill",
) -> Program:
    """One step of the engine: edit the row state, run the model, sample, advance the rows.

    `sampler` is one of SAMPLERS, at least that of each row; the logits are an output of all but
    "plain". In `phase` "decode" no row joins.

    Run-time sizes: T tokens, R rows and R1 = R + 1, S sampled rows; D rows that decode, which come
    first, Q tokens at most in another row, C tokens at most in a context; CP blocks to copy. Of
    the engine: SLOTS row slots, MB entries of a block table, NB blocks, E and B: most edits of
    rows and of tables in a step.
    """
    assert sampler in SAMPLERS and phase in ("prefill", "decode"), (sampler, phase)
    p = Program(name)
    heads, head_dim = config.num_key_value_heads, config.head_dim
    kv_shape = ("NB", config.num_hidden_layers, 2, heads, block_size, head_dim)
    p.buffer("kv_cache", kv_shape, None, STATE)
    model = ARCHITECTURES[config.architecture]
    _step_inputs(p, phase)
    x = model.embed(p, config, "x")
    if sampler == "adjust":
        _count_tokens(p, config, phase)
    for layer in range(config.num_hidden_layers):
        last = layer == config.num_hidden_layers - 1
        out, out_kind = ("hidden", OUTPUT) if last else (f"layer{layer}.x", TEMP)
        x = model.decoder_layer(p, config, layer, x, out, out_kind)
    x = p.emit("select_rows", "sampled_x", x=x, index="sample_index")
    logits = model.head(p, config, x, "logits", TEMP if sampler == "plain" else OUTPUT)
    _sample(p, logits, sampler)
    p.emit(
        "advance_rows",
        **_same("batch_slots seq_lens sample_slots tokens row_position row_token"),
    )
    return p


def edits_program(name: str) -> Program:
    """The host's edits alone, for more of them than the inputs of one step hold."""
    p = Program(name)
    _apply_edits(p)
    return p


def logprobs_program(config: ModelConfig, name: str) -> Program:
    """Log-probabilities of the tokens that the step just before has sampled, not a plain one."""
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
    ARCHITECTURES[config.architecture].head(p, config, x, "score_logits", TEMP)
    _logprobs(p, "N", "score_logits", "score_targets")
    return p


def _declare_lists(p: Program) -> None:
    """What adjusts single logits of a row: biases (and bans), and bad words of several tokens."""
    p.buffer("row_bias_tokens", ("SLOTS", MAX_LOGIT_BIAS), DType.I32, STATE)
    p.buffer("row_bias_values", ("SLOTS", MAX_LOGIT_BIAS), DType.F32, STATE)
    p.buffer("row_bias_until", ("SLOTS", MAX_LOGIT_BIAS), DType.I32, STATE)
    p.buffer("row_bad_words", ("SLOTS", MAX_BAD_WORDS, BAD_WORD_WORDS), DType.I32, STATE)


def _apply_edits(p: Program) -> None:
    """The state of the rows, one of each for a slot, takes over what the host has changed."""
    p.buffer("block_tables", (1, "SLOTS", "MB"), DType.I32, STATE)
    p.buffer("row_position", ("SLOTS",), DType.I32, STATE)
    p.buffer("row_token", ("SLOTS",), DType.I32, STATE)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), DType.I32, STATE)
    p.buffer("row_edits", ("E", ROW_WORDS), DType.I32, INPUT)
    p.buffer("edit_counts", (2,), DType.I32, INPUT)
    p.buffer("block_edits", ("B", BLOCK_EDIT_WORDS), DType.I32, INPUT)
    p.emit(
        "apply_edits",
        **_same("edit_counts row_edits block_edits row_params row_position row_token block_tables"),
    )


def _step_inputs(p: Program, phase: str) -> None:
    """Applies the host's edits, spreads the rows over the step's tokens."""
    if phase == "prefill":  # declared first: the copy of a decode step starts behind it
        p.buffer("block_copies", ("CP", 2), DType.I32, INPUT)
    _apply_edits(p)
    p.buffer("batch_slots", ("R",), DType.I32, INPUT)
    p.buffer("query_start", ("R1",), DType.I32, INPUT)
    p.buffer("sample_rows", ("S",), DType.I32, INPUT)
    p.buffer("prompt_ids", ("T",), DType.I32, INPUT)
    if phase == "prefill":
        p.emit("copy_blocks", block_copies="block_copies", kv_cache="kv_cache")
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
        **_same(
            "batch_slots query_start prompt_ids sample_rows row_position row_token "
            "token_ids positions token_slots seq_lens sample_index sample_slots "
            "sample_positions"
        ),
    )


def _count_tokens(p: Program, c: ModelConfig, phase: str) -> None:
    """Counts the step's input tokens, for rows that ask for it."""
    p.buffer("token_counts", ("SLOTS", c.vocab_size), DType.I32, STATE)
    p.buffer("row_history", ("SLOTS", HISTORY), DType.I32, STATE)
    if phase == "prefill":
        p.emit("reset_counts", **_same("edit_counts row_edits token_counts"))
    p.emit(
        "count_tokens",
        **_same("token_ids positions token_slots row_params token_counts row_history"),
    )


def _sample(p: Program, logits: str, sampler: str) -> None:
    """The next token of each sampled row; `logits` stay as they are."""
    rows, at = _same("sample_slots row_params"), _same("sample_positions")
    if sampler == "adjust":
        _declare_lists(p)
        states = _same(f"token_counts row_history {_LISTS}")
        logits = p.emit("adjust_logits", "adjusted", logits=logits, **rows, **at, **states)
    filtered = sampler != "plain"
    p.emit("sample", "tokens", logits=logits, **rows, **at, filtered=filtered, out_kind=OUTPUT)


def _logprobs(p: Program, rows: str, logits: str, targets: str) -> None:
    """Log-probability and rank of the targets, and the P most likely tokens of each row."""
    p.buffer("target_logprob", (rows,), DType.F32, OUTPUT)
    p.buffer("target_rank", (rows,), DType.I32, OUTPUT)
    p.buffer("top_ids", (rows, "P"), DType.I32, OUTPUT)
    p.buffer("top_logprobs", (rows, "P"), DType.F32, OUTPUT)
    p.emit(
        "logprobs",
        logits=logits,
        targets=targets,
        **_same("target_logprob target_rank top_ids top_logprobs"),
    )


def _same(names: str) -> dict[str, Any]:
    """Operands that have the names of their buffers; `names` stand apart by spaces."""
    return {name: name for name in names.split()}
