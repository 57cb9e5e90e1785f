"""What `tinyvllm top` writes for given figures."""

import re

import pytest

from tinyvllm.cli.top_screen import FIRST_LABEL, STATES, Screen, printable, short_id
from tinyvllm.engine import view

HEX = "d41a9e6106f74676b4b51ca9a9c80d4b"


def figures(**changes):
    stats = {
        "num_requests_running": 2, "num_requests_waiting": 1, "num_requests_swapped": 1,
        "kv_blocks_total": 1000, "kv_blocks_used": 500, "kv_blocks_cached": 200,
        "kv_blocks_free": 300, "kv_slots_used": 8000, "kv_slots_empty": 80,
        "pool_used": 1 << 30, "pool_reserved": 3 << 29, "pool_reserved_high": 2 << 30,
        "pool_budget": 4 << 30, "swap_used_bytes": 1 << 20, "swap_pinned_bytes": 64 << 20,
        "swap_total_bytes": 4 << 30, "swap_out_bytes": 5 << 20, "swap_in_bytes": 0,
        "num_preemptions": 3, "num_preemptions_swap": 2, "num_preemptions_recompute": 1,
        "prefix_cache_queries": 100, "prefix_cache_hits": 25,
    }  # fmt: skip
    requests = [
        {
            "request_id": f"cmpl-{HEX}-{i}", "label": FIRST_LABEL + i, "state": state,
            "prompt_tokens": 10, "output_tokens": 2000, "blocks": 126, "host_blocks": i,
            "priority": 0, "preemptions": 0,
        }
        for i, state in enumerate(STATES)
    ]  # fmt: skip
    rates = {
        "generation_tokens": 1234.5, "prefill_tokens": 56.78, "loop_steps": 100.0,
        "loop_seconds": 0.5, "seconds": 1.0,
    }  # fmt: skip
    event = {"number": 0, "time": 0.0, "kind": "swap", "request_id": f"cmpl-{HEX}", "detail": "why"}
    return {
        "model": "m", "device": "a card", "time": 0.0, "stats": stats, "rates": rates,
        "config": {"preemption_threshold": 0.85}, "requests": requests, "requests_left_out": 7,
        "first_token": {"count": 1, "p50": 0.0123, "p99": 1.5},
        "next_token": {"count": 0, "p50": None, "p99": None}, "events": [event],
        **changes,
    }  # fmt: skip


def lines(width=100, height=None, colours=False, **changes):
    return Screen(width, height, colours).lines(figures(**changes), "URL", "live", live=True)


def test_all_figures_are_there():
    text = "\n".join(lines())
    for part in (
        "m on a card, URL", "1,234 tokens/s, 5.0 ms a step", "56.8 tokens/s computed, 25.0% cached",
        "12.3 ms median, p99 1.50 s", "Between tokens - median, p99 -",
        "2 running, 1 waiting, 1 swapped out", "3: 2 swapped, 1 computed again",
        "500 in use (50.0%)", "200 cached", "300 free of 1,000", "watermark 85%",
        "1.0%, 80 of 8,000 token places empty", "1.00 GiB used, 1.50 GiB reserved, 2.00 GiB at",
        "4.00 GiB budget", "1.00 MiB used, 64.00 MiB pinned of 4.00 GiB; 5.00 MiB copied",
        "#0  cmpl-d41a9e61-0      decoding           10   2,000     126       -         -",
        "swapped out", "and 7 more", "cmpl-d41a9e61 preempted, swapped out: why",
    ):  # fmt: skip
        assert part in text


def test_the_bar_shows_shares_and_the_watermark():
    (bar,) = re.findall(r"\[(.*)\]", "\n".join(lines(width=116)))
    assert len(bar) == 60 and bar.index("|") == 51
    assert (bar.count("#"), bar.count("=")) == (30, 12)


@pytest.mark.parametrize(("width", "height"), [(100, 24), (40, 15), (200, 60), (10, 5)])
def test_nothing_is_wider_or_higher_than_the_terminal(width, height):
    shown = lines(width, height)
    assert len(shown) <= height and max(map(len, shown)) <= width
    if height == 24:
        assert "lines more; a higher window shows them" in "\n".join(shown)
        assert "why" in shown[-1], "events stay"


def test_without_figures_there_are_dashes():
    nothing = {"count": 0, "p50": None, "p99": None}
    text = "\n".join(lines(rates=None, first_token=nothing, requests=[], events=[]))
    assert "Generated      - tokens/s, no steps now" in text and "none" in text


def test_colours_only_where_they_are_wanted():
    assert "\033" not in "".join(lines())
    coloured = "\n".join(lines(colours=True))
    assert re.sub(r"\033\[\d*m", "", coloured) == "\n".join(lines())


def test_what_others_chose_gives_the_terminal_no_commands():
    text = "".join(lines(model="a\033[2Jb\r\n\x9b5mc\u202e"))
    assert text.isprintable() and "a?[2Jb???5mc?" in text
    assert printable("é 漢 ok") == "é 漢 ok"


def test_names_agree_with_the_engine():
    assert FIRST_LABEL == view.FIRST_LABEL
    assert short_id(f"chatcmpl-{HEX}.3") == "chatcmpl-d41a9e61.3"
    states = re.search(r"state: (.*?)\n    \"\"\"", view.RequestView.__doc__ + '\n    """', re.S)
    assert set(re.findall(r'"(\w+)"', states.group(1))) == set(STATES)
