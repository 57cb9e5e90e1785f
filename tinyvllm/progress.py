"""A progress bar on the terminal, for work that a person waits for."""

from __future__ import annotations

import sys
from typing import Any

from tinyvllm.util import Closing


class Progress(Closing):
    """A bar that `update` moves on; nothing at all where standard error is no terminal.

    total: how many units there are, or None if nobody knows. unit: "B" counts bytes. shown: False
    for no bar anywhere.
    """

    def __init__(
        self, total: int | None, desc: str, unit: str = "it", *, shown: bool = True
    ) -> None:
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            # tqdm comes with tokenizers; loaded here, since most runs show no bar.
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(
                total=total,
                desc=desc,
                unit=unit,
                unit_scale=unit == "B",
                unit_divisor=1024 if unit == "B" else 1000,
                dynamic_ncols=True,
            )

    def update(self, amount: int = 1, note: str = "") -> None:
        """Moves the bar on; `note` stands behind it, e.g. a rate of tokens."""
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        if self._bar is not None:
            self._bar.close()
