"""The parameters of a row: the two declarations agree, and views share memory."""

import re

import numpy as np

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.ops.row_params import (
    ROW_PARAMS,
    ROW_WORDS,
    as_row_params,
    as_words,
    new_row_params,
)

C_TYPES = {"i32": np.int32, "u32": np.uint32, "float": np.float32}


def test_the_c_struct_has_the_same_fields_in_the_same_order():
    text = (cuda_src_dir() / "include" / "row_params.cuh").read_text()
    body = re.search(r"struct alignas\(16\) RowParams \{(.*?)\};", text, re.S).group(1)
    body = re.sub(r"//.*", "", body)
    fields = re.findall(r"^  (\w+) (\w+)(?:\[(\d+)\])?;", body, re.M)
    assert len(fields) == body.count(";")
    struct = np.dtype([(n, C_TYPES[t], (int(size),) if size else ()) for t, n, size in fields])
    assert struct == ROW_PARAMS
    assert ROW_PARAMS.itemsize == 64 and ROW_WORDS == 16


def test_views_share_memory():
    rows = new_row_params(3)
    words = as_words(rows)
    words[1, ROW_PARAMS.fields["top_k"][1] // 4] = 7
    assert words.shape == (3, 16) and rows["top_k"].tolist() == [0, 7, 0]
    again = as_row_params(words)
    again["seed"][2] = 5, 0xFFFFFFFF
    assert words[2, 4:6].tolist() == [5, -1]


def test_a_new_row_has_everything_off():
    row = new_row_params(1)[0]
    on = {name for name in ROW_PARAMS.names if np.any(row[name])}
    assert on == {"top_p", "repetition"} and row["top_p"] == row["repetition"] == 1
