"""Reading and drawing the lengths of requests."""

import numpy as np
import pytest

from tinyvllm.bench.lengths import Lengths, exponential_lengths, read_lengths
from tinyvllm.util import InputError


@pytest.mark.parametrize(
    "text",
    [
        "161 338\n5\t7\n",
        "input_len,output_len\n161,338\n5, 7\n",
        "# two requests\n\n[161, 338]\n[5, 7]",
        '{"input_len": 161, "output_len": 338}\n{"output_len": 7, "input_len": 5, "id": "x"}\n',
    ],
)
def test_formats(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path) == [Lengths(161, 338), Lengths(5, 7)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("161", "'161': must be two numbers"),
        ("1 2 3", "'1 2 3': must be two numbers"),
        ("161 0", "output_len=0: must be from 1 to"),
        ("many 338", "'many 338': must be two numbers"),
        ("1" * 5000 + " 1", r"'1+\.\.\.: must be two numbers"),
        ("-1 5", "'-1 5': must be two numbers"),
        ("[161, 338.5]", r"output_len=338\.5: must be an integer"),
        ("[161, true]", "output_len=True: must be an integer"),
        ("[161, 338", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"input_len": 161}', "output_len missing"),
        ("input_len,output_len", "'input_len,output_len': must be two numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "lengths.txt"
    path.write_text(f"5 7\n\n{line}\n5 7\n")
    with pytest.raises(InputError, match=rf"lengths\.txt:3: .*{message}"):
        read_lengths(path)


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"input_len,output_len\n"])
def test_a_file_without_requests(tmp_path, content):
    (tmp_path / "empty").write_bytes(content)
    with pytest.raises(InputError, match="no requests"):
        read_lengths(tmp_path / "empty")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_lengths(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_lengths(tmp_path / "binary")


def test_the_mark_that_spreadsheets_write_first(tmp_path):
    (tmp_path / "lengths.csv").write_bytes(b"\xef\xbb\xbfinput_len,output_len\r\n161,338\r\n")
    assert read_lengths(tmp_path / "lengths.csv") == [Lengths(161, 338)]


@pytest.mark.parametrize("mean", [-1, float("nan"), float("inf"), 1e30])
def test_means_of_lengths_that_cannot_be(mean):
    with pytest.raises(InputError, match="mean_input_len="):
        exponential_lengths(3, mean, 5)
    with pytest.raises(InputError, match="mean_output_len="):
        exponential_lengths(3, 5, mean)


def test_exponential_lengths():
    lengths = exponential_lengths(4000)
    assert lengths == exponential_lengths(4000)
    assert np.mean(lengths, axis=0) == pytest.approx([161.5, 338.5], rel=0.05)
    assert np.std(lengths, axis=0) == pytest.approx([161, 338], rel=0.1)
    assert np.min(exponential_lengths(4000, 0.5, 2)) == 1
