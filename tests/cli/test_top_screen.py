"""What `tinyvllm top` writes for given figures."""

import re

import pytest
from top_figures import HEX, figures

from tinyvllm.cli.top_screen import FIRST_LABEL, STATES, Screen, printable, short_id
from tinyvllm.engine import view


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
