"""Weights: what a checkpoint must hold, and that the uploader's pieces make the packed layout."""

import numpy as np
import pytest
from harness import pack

from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.plan import ALIGNMENT
from tinyvllm.memory.upload import SLOT_BYTES
from tinyvllm.model import weights as weights_module
from tinyvllm.model.weights import (
    check_weights,
    copy_jobs,
    load_numpy,
    packed_weights,
    parts_of,
    place_weights,
)
from tinyvllm.ops.program import Program, Weight
from tinyvllm.util import DType, InputError

BASE = 1 << 20  # address of the simulated device memory


class ArraySource:
    """A checkpoint in memory: float32 arrays by name."""

    def __init__(self, arrays):
        self.arrays = arrays

    def names(self):
        return list(self.arrays)

    def shape(self, name):
        return self.arrays[name].shape

    def read(self, name, dtype, out, start=0):
        assert out.dtype == dtype.storage and out.ndim == 1
        out[:] = dtype.encode(self.arrays[name].reshape(-1)[start : start + out.size])

    def close(self):
        pass


def random_source(shapes):
    rng = np.random.default_rng(0)
    return ArraySource({n: rng.standard_normal(s, np.float32) for n, s in shapes.items()})


def run_jobs(jobs, num_bytes):
    """Device memory after the copies, and how often each byte was written."""
    memory, written = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, int)
    for job in jobs:
        assert 0 < job.num_bytes <= weights_module.SLOT_BYTES
        assert job.num_bytes % job.row_bytes == 0 and job.row_bytes <= job.dst_pitch
        piece = np.zeros(job.num_bytes, np.uint8)
        job.fill(piece)
        for i, row in enumerate(piece.reshape(-1, job.row_bytes)):
            start = job.dst - BASE + i * job.dst_pitch
            memory[start : start + job.row_bytes] = row
            written[start : start + job.row_bytes] += 1
    return memory, written


WEIGHTS = [
    (Weight("plain", (24, 16), ("plain",)), {"plain": (24, 16)}),
    (Weight("norm", (40,), ("norm",)), {"norm": (40,)}),
    (Weight("odd", (13, 24), ("odd",)), {"odd": (13, 24)}),
    (Weight("qkv", (56, 16), ("q", "k", "v")), {"q": (32, 16), "k": (8, 16), "v": (16, 16)}),
    (Weight("qkv.bias", (56,), ("q", "k", "v")), {"q": (32,), "k": (8,), "v": (16,)}),
    (Weight("gate_up", (96, 16), ("g", "u"), 8), {"g": (48, 16), "u": (48, 16)}),
    (Weight("gate_up.bias", (96,), ("g", "u"), 8), {"g": (48,), "u": (48,)}),
    (Weight("three", (72, 24), ("a", "b", "c"), 4), dict.fromkeys("abc", (24, 24))),
]


@pytest.mark.parametrize("slot_bytes", [256, 1000, 1536, SLOT_BYTES])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.F32])
@pytest.mark.parametrize(("weight", "shapes"), WEIGHTS, ids=lambda x: getattr(x, "name", ""))
def test_copy_jobs_write_the_packed_layout_once(monkeypatch, weight, shapes, dtype, slot_bytes):
    group_bytes = max(weight.interleave, 1) * (*weight.shape, 1)[1] * dtype.itemsize
    slot_bytes = max(slot_bytes, group_bytes)  # a group of rows that stay together must fit
    monkeypatch.setattr(weights_module, "SLOT_BYTES", slot_bytes)
    source = random_source(shapes)
    arrays, num_bytes = place_weights({weight.name: weight}, dtype, BASE)
    jobs = list(copy_jobs(source, {weight.name: weight}, arrays))
    memory, written = run_jobs(jobs, num_bytes)
    used = arrays[weight.name].nbytes
    assert (written[:used] == 1).all() and not written[used:].any()
    want = dtype.encode(pack(weight, source.arrays))
    np.testing.assert_array_equal(memory[:used].view(dtype.storage).reshape(weight.shape), want)
    if slot_bytes == SLOT_BYTES:
        assert len(jobs) == len(weight.parts), "small tensors are one piece each"
    elif used > 4 * slot_bytes:
        assert len(jobs) > len(weight.parts)


def test_all_weights_lie_aligned_behind_each_other():
    weights = {w.name: w for w, _ in WEIGHTS}
    arrays, num_bytes = place_weights(weights, DType.BF16, BASE)
    end = BASE
    for name, weight in weights.items():
        assert arrays[name].ptr == -(-end // ALIGNMENT) * ALIGNMENT
        assert (arrays[name].shape, arrays[name].dtype) == (weight.shape, DType.BF16)
        end = arrays[name].ptr + arrays[name].nbytes
    assert end <= BASE + num_bytes < end + ALIGNMENT
    assert place_weights({}, DType.BF16) == ({}, 0)


def test_parts_begin_where_the_packed_layout_has_their_first_row():
    array = DeviceArray(BASE, (96, 16), DType.BF16)
    stacked = parts_of(Weight("w", (96, 16), ("a", "b")), array, [64, 32])
    assert [(p.ptr - BASE, p.shape) for p in stacked] == [(0, (64, 16)), (64 * 32, (32, 16))]
    alternating = parts_of(Weight("w", (96, 16), ("a", "b"), 8), array, [48, 48])
    assert [p.ptr - BASE for p in alternating] == [0, 8 * 32]


def test_programs_share_weights_of_equal_name():
    first, second = Program("a"), Program("b")
    first.weight("x", 4, 8)
    second.weight("x", 4, 8)
    second.weight("y", 8)
    assert list(packed_weights([first, second])) == ["x", "y"]
    second.weights["x"] = Weight("x", (4, 8), ("x",), 2)
    with pytest.raises(AssertionError, match="x is packed in two ways"):
        packed_weights([first, second])


@pytest.fixture
def program():
    p = Program("model")
    p.weight("model.embed_tokens.weight", 16, 8)
    p.weight("model.norm.weight", 8)
    for i in range(3):
        p.weight(f"model.layers.{i}.mlp.up_proj.weight", 24, 8)
    return p


def checkpoint(program, **changes):
    shapes = {name: weight.shape for name, weight in program.weights.items()}
    shapes.update({name.replace("__", "."): shape for name, shape in changes.items()})
    return random_source({name: shape for name, shape in shapes.items() if shape is not None})


def test_a_complete_checkpoint_is_accepted(program):
    check_weights(checkpoint(program), program, "here")
    rope = "model__layers__0__self_attn__rotary_emb__inv_freq"
    check_weights(checkpoint(program, **{rope: (4,)}), program, "here")


def test_a_tied_checkpoint_may_repeat_its_embedding(program):
    repeated = checkpoint(program, lm_head__weight=(16, 8))
    check_weights(repeated, program, "here")
    program.weight("lm_head.weight", 16, 8)
    check_weights(repeated, program, "here")
    without = random_source(
        {n: a.shape for n, a in repeated.arrays.items() if n != "lm_head.weight"}
    )
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        check_weights(without, program, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"model\.norm\.weight is missing"),
        ({"model__norm__bias": (8,)}, r"model\.norm\.bias is not part of this architecture"),
        ({"model__norm__weight": (9,)}, r"model\.norm\.weight has shape \[9\], must be \[8\]"),
        ({"model__norm__weight": (8, 1)}, r"has shape \[8, 1\], must be \[8\]"),
        ({"model__embed_tokens__weight": (8, 16)}, r"has shape \[8, 16\], must be \[16, 8\]"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(program, changes, message):
    with pytest.raises(InputError, match=f"^file: the tensors do not fit .*{message}"):
        check_weights(checkpoint(program, **changes), program, "file")


def test_many_problems_are_counted_and_not_all_listed(program):
    source = random_source({f"extra.{i}": (1,) for i in range(4)})
    with pytest.raises(InputError) as error:
        check_weights(source, program, "file")
    text = str(error.value)
    assert text.count(" is missing") == 5 and text.endswith("; and 4 more")


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_the_cpu_gets_float32_rounded_to_the_models_type(program, dtype):
    source = checkpoint(program)
    arrays = load_numpy(source, program, dtype)
    assert arrays.keys() == program.weights.keys()
    for name, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, dtype.round(source.arrays[name]))
