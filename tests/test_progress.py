"""Progress bars: on a terminal only."""

import io
import sys

import pytest

from tinyvllm.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_bar(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]) -> None:
    output = stream()
    monkeypatch.setattr(sys, "stderr", output)
    with Progress(4, "loading") as bar:
        for _ in range(4):
            bar.update(note="12 tokens/s")
    text = output.getvalue()
    if stream is Terminal:
        assert "loading: 100%" in text and "4/4" in text and text.endswith("12 tokens/s]\n")
    else:
        assert text == ""


def test_bytes_and_unknown_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(3 << 20, "weights", unit="B") as bar:
        bar.update(3 << 20)
    with Progress(None, "tokens") as bar:
        bar.update(5)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "3.00M/3.00M" in text and "tokens: 5it" in text
