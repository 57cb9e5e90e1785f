"""What `tinyvllm top` shows: lines of text made of a server's figures."""

from __future__ import annotations

import re
import time
from typing import Any

from tinyvllm.util import format_bytes

FIRST_LABEL = 4  # of the server's `label`, see `tinyvllm.engine.view`
STATES = {
    "decode": "decoding",
    "prefill": "prefill",
    "return": "coming back",
    "swapped": "swapped out",
    "preempted": "to recompute",
    "waiting": "waiting",
}
EVENTS = {
    "above": "above the watermark, nothing is admitted",
    "below": "back below the watermark",
    "swap": "preempted, swapped out",
    "recompute": "preempted, to be computed again",
    "return": "runs again",
    "fail": "ended, its blocks could not be copied",
}
BOLD, DIM, GREEN, YELLOW, RED = "1", "2", "32", "33", "31"
_NUM_EVENTS = 5
_COLUMN = 58  # letters
_UUID = re.compile(r"([0-9a-f]{8})[0-9a-f]{24}")


class Screen:
    """Lines for a terminal of so many columns and rows (None: as many as there are), with or
    without colours."""

    def __init__(self, width: int, height: int | None, colours: bool) -> None:
        self._width, self._height, self._colours = width, height, colours

    def lines(self, data: dict[str, Any], url: str, status: str, *, live: bool) -> list[str]:
        """A server's figures (see `tinyvllm.serve.dashboard`); `status` is that of the
        connection."""
        title = f"tinyvllm: {data['model']} on {data['device']}, {url}"
        head = [
            self._line(title, BOLD),
            self._line(f"{_clock(data['time'])}  {status}", GREEN if live else RED),
            "",
            *map(self._line, self._columns(_figures(data))),
            *self._memory(data["stats"], data["config"]["preemption_threshold"]),
            "",
        ]
        events = self._events(data["events"])
        rows = self._requests(data["requests"], data["requests_left_out"])
        if self._height is not None:
            rows = self._fitting(rows, self._height - len(head) - len(events))
        return [*head, *rows, *events][: self._height]

    def _columns(self, lines: list[str]) -> list[str]:
        """The lines, two of them in one where there is room."""
        if self._width < 2 * _COLUMN:
            return lines
        return [f"{a:<{_COLUMN}}{b}" for a, b in zip(lines[::2], lines[1::2], strict=True)]

    def _memory(self, stats: dict[str, float], watermark: float) -> list[str]:
        total = stats["kv_blocks_total"]
        used, cached = stats["kv_blocks_used"], stats["kv_blocks_cached"]
        width = max(10, min(60, self._width - 16))
        bar = _bar(width, used / total, cached / total)
        mark = min(width - 1, round(watermark * width))
        bar = bar[:mark] + "|" + bar[mark + 1 :]
        empty, slots = stats["kv_slots_empty"], stats["kv_slots_used"]
        return [
            self._line(f"KV blocks      [{bar}]", RED if used > watermark * total else GREEN),
            self._line(
                f"               # {_number(used)} in use ({used / total:.1%}), = "
                f"{_number(cached)} cached, . {_number(stats['kv_blocks_free'])} free of "
                f"{_number(total)}; | watermark {watermark:.0%}"
            ),
            self._line(
                f"Fragmentation  {empty / slots if slots else 0:.1%}, {_number(empty)} of "
                f"{_number(slots)} token places empty"
            ),
            self._line(
                f"Pool           {_bytes(stats['pool_used'])} used, "
                f"{_bytes(stats['pool_reserved'])} reserved, "
                f"{_bytes(stats['pool_reserved_high'])} at the peak, "
                f"{_bytes(stats['pool_budget'])} budget"
            ),
            self._line(
                f"Swap space     {_bytes(stats['swap_used_bytes'])} used, "
                f"{_bytes(stats['swap_pinned_bytes'])} pinned of "
                f"{_bytes(stats['swap_total_bytes'])}; {_bytes(stats['swap_out_bytes'])} copied "
                f"out, {_bytes(stats['swap_in_bytes'])} back"
            ),
        ]

    def _requests(self, requests: list[dict[str, Any]], left_out: int) -> list[str]:
        form = "{:>6}  {:<20} {:<13} {:>7} {:>7} {:>7} {:>7} {:>9}"
        names = ("seq", "request", "state", "prompt", "output", "blocks", "on host", "preempted")
        lines = [self._line(form.format(*names), DIM)]
        for request in requests:
            state = request["state"]
            text = form.format(
                f"#{request['label'] - FIRST_LABEL}",
                short_id(request["request_id"]),
                STATES.get(state, state),
                _number(request["prompt_tokens"]),
                _number(request["output_tokens"]),
                _number(request["blocks"]),
                _number(request["host_blocks"]) if request["host_blocks"] else "-",
                _number(request["preemptions"]) if request["preemptions"] else "-",
            )
            waits = state in ("swapped", "preempted", "waiting")
            lines.append(self._line(text, YELLOW if waits else None))
        if left_out:
            lines.append(self._line(f"        and {_number(left_out)} more", DIM))
        if not requests:
            lines.append(self._line("        none", DIM))
        return lines

    def _fitting(self, rows: list[str], room: int) -> list[str]:
        room = max(2, room)
        if len(rows) <= room:
            return rows
        more = f"        and {len(rows) - room + 1} lines more; a higher window shows them"
        return [*rows[: room - 1], self._line(more, DIM)]

    def _events(self, events: list[dict[str, Any]]) -> list[str]:
        lines = []
        for event in events[: -_NUM_EVENTS - 1 : -1]:
            what = EVENTS.get(event["kind"], event["kind"])
            parts = [short_id(event["request_id"]), what + ":", event["detail"]]
            text = " ".join(part for part in parts if part)
            bad = event["kind"] not in ("below", "return")
            lines.append(self._line(f"{_clock(event['time'])}  {text}", RED if bad else GREEN))
        return ["", *lines] if lines else []

    def _line(self, text: str, style: str | None = None) -> str:
        text = printable(text)[: self._width]
        return f"\033[{style}m{text}\033[0m" if style and self._colours else text


def printable(text: str) -> str:
    """The text without what a terminal would take for a command."""
    return "".join(c if c.isprintable() else "?" for c in text)


def short_id(request_id: str) -> str:
    """A request's name, of whose long number only the beginning is left."""
    return _UUID.sub(r"\1", request_id)


def _figures(data: dict[str, Any]) -> list[str]:
    stats, rates = data["stats"], data["rates"] or {}
    first, after = data["first_token"], data["next_token"]
    steps = rates.get("loop_steps")
    step = f"{_time(rates['loop_seconds'] / steps)} a step" if steps else "no steps now"
    queries = stats["prefix_cache_queries"]
    hits = stats["prefix_cache_hits"] / queries if queries else 0.0
    return [
        f"Generated      {_rate(rates.get('generation_tokens'))} tokens/s, {step}",
        f"Prompts        {_rate(rates.get('prefill_tokens'))} tokens/s computed, {hits:.1%} cached",
        f"First token    {_time(first['p50'])} median, p99 {_time(first['p99'])}",
        f"Between tokens {_time(after['p50'])} median, p99 {_time(after['p99'])}",
        f"Sequences      {_number(stats['num_requests_running'])} running, "
        f"{_number(stats['num_requests_waiting'])} waiting, "
        f"{_number(stats['num_requests_swapped'])} swapped out",
        f"Preemptions    {_number(stats['num_preemptions'])}: "
        f"{_number(stats['num_preemptions_swap'])} swapped, "
        f"{_number(stats['num_preemptions_recompute'])} computed again",
    ]


def _bar(width: int, used: float, cached: float) -> str:
    """A bar of used and cached blocks; whatever there is has at least one letter."""
    first = max(round(used * width), int(used > 0))
    second = min(max(round(cached * width), int(cached > 0)), width - first)
    return "#" * first + "=" * second + "." * (width - first - second)


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else _number(value)


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
