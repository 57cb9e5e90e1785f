"""Lengths of prompts and outputs to measure with: drawn at random, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinyvllm.config import check_int, check_number
from tinyvllm.util import InputError, short_repr

# Means of the conversations (ShareGPT) in the PagedAttention paper, in tokens.
MEAN_INPUT_LEN = 161
MEAN_OUTPUT_LEN = 338
MAX_LENGTH = 1 << 24  # as for max_model_len


class Lengths(NamedTuple):
    """Of one request, in tokens."""

    input_len: int
    output_len: int


def exponential_lengths(
    count: int, mean_input_len: float = MEAN_INPUT_LEN, mean_output_len: float = MEAN_OUTPUT_LEN
) -> list[Lengths]:
    """`count` requests of exponentially distributed lengths, the same each time.

    Raises InputError for a mean below 0, or beyond what lengths may be.
    """
    for name, mean in zip(Lengths._fields, (mean_input_len, mean_output_len), strict=True):
        check_number(f"mean_{name}", mean, 0, MAX_LENGTH)
    rng = np.random.default_rng(0)
    means = (mean_input_len, mean_output_len)
    columns = (np.ceil(rng.exponential(mean, count)).clip(1).astype(int).tolist() for mean in means)
    return [Lengths(*pair) for pair in zip(*columns, strict=True)]


def read_lengths(path: str | Path) -> list[Lengths]:
    """The requests of a file with one a line, its prompt's and its output's length.

    A line holds two numbers, with blanks or a comma between them, or JSON: [161, 338] or
    {"input_len": 161, "output_len": 338}. Empty lines and those that begin with # are left out,
    and so is a first line that names the columns of a CSV file. Raises InputError with file and
    line for anything else.
    """
    try:
        text = Path(path).read_text("utf-8-sig")  # spreadsheets write a mark first
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"lengths {str(path)!r}: cannot be read: {error}") from None
    found = []
    header_possible = True
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        names = [name.strip() for name in line.split(",")]
        if header_possible and names == list(Lengths._fields):
            header_possible = False
            continue
        header_possible = False
        try:
            found.append(_parse(line))
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from None
    if not found:
        raise InputError(f"lengths {str(path)!r}: the file has no requests")
    return found


def _parse(line: str) -> Lengths:
    if line.lstrip()[0] in "[{":
        values = _json_values(line)
    else:
        words = line.replace(",", " ").split()
        values = [int(word) for word in words if word.isdecimal() and len(word) < 10]
        if len(values) < len(words):
            values = []
    if len(values) != 2:
        raise InputError(
            f"{short_repr(line.strip())}: must be two numbers, the lengths of prompt and output"
        )
    for name, value in zip(Lengths._fields, values, strict=True):
        check_int(name, value, 1, MAX_LENGTH)
    return Lengths(*values)


def _json_values(line: str) -> list[Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"no JSON: {error}") from None
    if isinstance(value, dict):
        missing = [name for name in Lengths._fields if name not in value]
        if missing:
            raise InputError(f"{' and '.join(missing)} missing")
        return [value[name] for name in Lengths._fields]
    return list(value)
