"""The state of running sequences against a plain loop over rows and tokens."""

import numpy as np
import pytest
from harness import run_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.ops.row_params import ROW_WORDS
from tinyvllm.util import DType

GARBAGE = np.int32(-0x01010102)
I32 = DType.I32
STEP_OUTPUTS = {
    "token_ids": "T",
    "positions": "T",
    "token_slots": "T",
    "seq_lens": "R",
    "sample_index": "S",
    "sample_slots": "S",
    "sample_positions": "S",
}


def program() -> Program:
    """Edits, inputs of a step, and the advance by given tokens."""
    p = Program("t")
    for name in ("row_position", "row_token"):
        p.buffer(name, ("SLOTS",), I32, STATE)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), I32, STATE)
    p.buffer("block_tables", (2, "SLOTS", "MB"), I32, STATE)
    for name, shape in (
        ("edit_counts", (2,)),
        ("row_edits", ("E", ROW_WORDS)),
        ("batch_slots", ("R",)),
        ("query_start", ("R1",)),
        ("sample_rows", ("S",)),
        ("tokens", ("S",)),
        ("block_edits", ("B", 4)),
        ("prompt_ids", ("T",)),
    ):
        p.buffer(name, shape, I32, INPUT)
    for name, size in STEP_OUTPUTS.items():
        p.buffer(name, (size,), I32, OUTPUT)
    for kind in ("apply_edits", "step_inputs", "advance_rows"):
        op = op_def(kind)
        p.emit(kind, **{name: name for name in (*op.reads, *op.writes)})
    return p


def case(R: int, S: int, longest: int, edits: int, seed: int = 0):
    """(dims, arrays) of a step with R rows of up to `longest` tokens; each third is padding."""
    rng = np.random.default_rng(seed)
    slots, table_len = R + 3, 5

    def ints(high, *shape):
        return rng.integers(0, high, shape).astype(np.int32)

    lengths = rng.integers(1, longest + 1, R)
    lengths[: R // 3] = 1
    num_decode = R if longest == 1 else R // 3
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    T = int(query_start[-1])
    row_edits = np.full((edits + 2, ROW_WORDS), GARBAGE)
    row_edits[:edits] = rng.integers(-(2**31), 2**31, (edits, ROW_WORDS))
    row_edits[:edits, 0] = rng.permutation(slots)[:edits]
    row_edits[:edits, 1:3] = ints(1000, edits, 2)
    places = rng.permutation(2 * slots * table_len)[: 2 * edits]
    block_edits = np.full((2 * edits + 300, 4), GARBAGE)
    block_edits[: 2 * edits, :3] = np.stack(np.unravel_index(places, (2, slots, table_len)), 1)
    block_edits[: 2 * edits, 3] = ints(10**6, 2 * edits)
    prompt_ids = ints(50000, T)
    prompt_ids[rng.random(T) < 0.3] = -1
    batch_slots = rng.permutation(slots)[:R].astype(np.int32)
    batch_slots[2::3] = -1
    arrays = {
        "row_position": ints(1000, slots),
        "row_token": ints(50000, slots),
        "row_params": ints(2**31, slots, ROW_WORDS),
        "block_tables": ints(1000, 2, slots, table_len),
        "edit_counts": np.array([edits, 2 * edits], np.int32),
        "row_edits": row_edits,
        "block_edits": block_edits,
        "batch_slots": batch_slots,
        "query_start": query_start,
        "sample_rows": np.sort(rng.permutation(R)[:S]).astype(np.int32),
        "tokens": ints(50000, S),
        "prompt_ids": prompt_ids,
    }
    dims = {
        "T": T,
        "R": R,
        "R1": R + 1,
        "S": S,
        "D": num_decode,
        "SLOTS": slots,
        "MB": table_len,
        "E": len(row_edits),
        "B": len(block_edits),
    }
    return dims, arrays


def expected(dims, arrays) -> dict[str, np.ndarray]:
    """What the three ops must do, one row and token at a time."""
    state = {
        n: arrays[n].copy() for n in ("row_position", "row_token", "row_params", "block_tables")
    }
    for edit in arrays["row_edits"][: arrays["edit_counts"][0]]:
        slot, position, token = edit[:3]
        state["row_params"][slot] = edit
        state["row_position"][slot], state["row_token"][slot] = position, token
    for group, slot, index, block in arrays["block_edits"][: arrays["edit_counts"][1]].tolist():
        state["block_tables"][group, slot, index] = block
    out: dict[str, list[int]] = {name: [] for name in STEP_OUTPUTS}
    starts, slots = arrays["query_start"].tolist(), arrays["batch_slots"].tolist()
    for r, slot in enumerate(slots):
        count = starts[r + 1] - starts[r]
        out["token_slots"] += [slot] * count
        if slot < 0:
            out["token_ids"] += [0] * count
            out["positions"] += [0] * count
            out["seq_lens"].append(0)
            continue
        position = int(state["row_position"][slot])
        for t in range(starts[r], starts[r + 1]):
            given = int(arrays["prompt_ids"][t])
            out["token_ids"].append(given if given >= 0 else int(state["row_token"][slot]))
            out["positions"].append(position + t - starts[r])
        out["seq_lens"].append(position + count)
    for r in arrays["sample_rows"].tolist():
        out["sample_index"].append(starts[r + 1] - 1)
        out["sample_slots"].append(slots[r])
        out["sample_positions"].append(out["seq_lens"][r])
    for slot, length in zip(slots, out["seq_lens"], strict=True):
        if slot >= 0:
            state["row_position"][slot] = length
    for slot, token in zip(out["sample_slots"], arrays["tokens"], strict=True):
        if slot >= 0:
            state["row_token"][slot] = token
    return state | {name: np.array(values, np.int32) for name, values in out.items()}


CASES = [(1, 1, 1, 0), (1, 0, 9, 1), (7, 7, 1, 3), (17, 5, 40, 17), (300, 300, 3, 300)]


@pytest.mark.parametrize(("R", "S", "longest", "edits"), CASES)
def test_reference(R, S, longest, edits):
    dims, arrays = case(R, S, longest, edits)
    out = run_numpy(program(), dims, arrays)
    for name, want in expected(dims, arrays).items():
        np.testing.assert_array_equal(out[name], want, err_msg=name)


def test_launches_cover_the_longest_of_the_sizes():
    def grid(T, R, S):
        op, sizes = op_def("step_inputs"), {"T": T, "R": R, "R1": R + 1, "S": S, "SLOTS": 9}
        shapes = {**op.reads, **op.writes}
        arrays = {n: DeviceArray(0, (sizes[shapes[n][0]],), I32) for n in shapes}
        a = Operands(**arrays, dims={"D": 0})
        return [launch.grid[0] for launch in op.launches(a, None)]

    assert grid(0, 0, 0) == []
    assert grid(1, 1, 0) == [1]
    assert grid(257, 1, 1) == [2]
    assert grid(256, 256, 256) == [1]


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "S", "longest", "edits"), [*CASES, (3, 2, 3000, 2)])
def test_kernels(device, R, S, longest, edits):
    dims, arrays = case(R, S, longest, edits)
    limits = {n: dims[n] + 5 for n in ("T", "R", "R1", "S")}
    out = run_cuda(device, program(), dims, arrays, limits=limits)
    for name, want in expected(dims, arrays).items():
        np.testing.assert_array_equal(out[name], want, err_msg=name)
