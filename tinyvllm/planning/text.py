"""The report of `tinyvllm plan` as text."""

from __future__ import annotations

from tinyvllm.planning.report import BufferPlan, Report
from tinyvllm.util import format_bytes

SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of decode.plain; all buckets are in the JSON


def report_text(report: Report, lengths_note: str) -> str:
    """What fits, how much of the cache blocks waste, and how well the buffers share memory."""
    lines = [
        report.where,
        f"on one {report.device} with {format_bytes(report.free_bytes)} free (assumed, not asked)",
        "",
        *_fit(report),
        "",
        f"KV memory without a token in it, by block size ({lengths_note})",
        f"{'block_size':>10} {'wasted':>8} {'requests that fit':>18}",
        *(f"{w.block_size:>10} {w.wasted:>8.2%} {w.sequences:>18}" for w in report.waste),
        "",
        "Buffers of a step in one arena; ratio: arena / largest sum of buffers alive at once",
        f"{'program':<27} {'arena':>11} {'without reuse':>14} {'lower bound':>12} {'ratio':>6}  "
        "same offsets in all layers",
        *(_program(b) for b in report.buffers if _shown(b, report.config.max_num_seqs)),
    ]
    return "\n".join(lines)


def _fit(report: Report) -> list[str]:
    if report.memory is None:
        return ["does not fit", "", *report.problem.splitlines()]
    memory, tokens = report.memory, report.kv_tokens
    average = next(w for w in report.waste if w.block_size == report.config.block_size)
    return [
        *memory.table().splitlines(),
        "",
        f"fits: {tokens} tokens of K and V, {format_bytes(report.token_bytes)} each, "
        f"in blocks of {report.config.block_size}",
        f"      {tokens // report.max_model_len} sequences of max_model_len={report.max_model_len} "
        f"or {average.sequences} of the lengths below",
        f"      at most max_num_seqs={report.config.max_num_seqs} run at once",
    ]


def _shown(b: BufferPlan, max_num_seqs: int) -> bool:
    return b.rows == max_num_seqs or (b.program.name == "decode.plain" and b.rows in SHOWN_ROWS)


def _program(b: BufferPlan) -> str:
    p = b.plan
    return (
        f"{b.title:<27} {format_bytes(p.arena_bytes):>11} "
        f"{format_bytes(p.bytes_without_reuse):>14} {format_bytes(p.lower_bound):>12} "
        f"{b.ratio:>6.3f}  {'yes' if b.layers_agree else 'no'}"
    )


def buffers_text(b: BufferPlan) -> str:
    """The buffers outside the layers and those of the first layer, by time."""
    shown = [life for life in b.lives if b.layer(life) in (None, 0)]
    lines = [
        f"Buffers of {b.title}: an arena of {format_bytes(b.plan.arena_bytes)}, "
        f"{len(b.program.ops)} ops",
        f"{'buffer':<33} {'offset':>11} {'size':>11} {'ops':>9}  its memory then serves",
    ]
    for life in sorted(shown, key=lambda life: (life.first, b.plan.offsets[life.name])):
        span = f"{life.first}-{life.last}"
        lines.append(
            f"{life.name:<33} {format_bytes(b.plan.offsets[life.name]):>11} "
            f"{format_bytes(life.size):>11} {span:>9}  {', '.join(b.heirs(life.name))}".rstrip()
        )
    if b.layers_agree:
        lines.append("All further layers use the same offsets as layer 0.")
    return "\n".join(lines)
