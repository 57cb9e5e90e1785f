"""Dummy weights: the hash by a scalar twin, the layouts by an index loop, the GPU by the bits."""

import numpy as np
import pytest

from tinyvllm.ops.random_fill import dummy_values, fill_launches
from tinyvllm.util import DType


def scalar_value(index: int, key: int) -> int:
    """The random number of one element, -32768 ... 32767, as hash.cuh describes it."""
    mask = 2**32 - 1
    h = (index & mask) ^ key
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = (h + (index >> 32) * 0x9E3779B9 + key * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    return (h >> 16) - (65536 if h >> 31 else 0)


@pytest.mark.parametrize("first", [0, 5, 2**14 - 3, 2**32 - 4, 7 * 2**32 + 9])
def test_values_follow_the_hash(first):
    key = 0xDEADBEEF
    want = [scalar_value(first + i, key) for i in range(9)]
    np.testing.assert_array_equal(dummy_values(key, first, 9, 0.0, 1.0), want)
    expected = np.float32(0.5) + np.array(want, np.float32) * np.float32(0.1)
    np.testing.assert_array_equal(dummy_values(key, first, 9, 0.5, 0.1), expected)


def test_values_do_not_depend_on_the_range_asked_for():
    whole = dummy_values(3, 0, 50_000, 0.0, 1.0)
    np.testing.assert_array_equal(dummy_values(3, 16_000, 20_000, 0.0, 1.0), whole[16_000:36_000])
    assert dummy_values(3, 7, 0, 0.0, 1.0).size == 0


def test_values_are_spread_and_independent():
    a, b = (dummy_values(key, 0, 1 << 20, 0.0, 2.0**-15) for key in (1, 2))
    assert abs(a.mean()) < 3e-3 and abs(a.std() - 3**-0.5) < 3e-3
    for other in (b, np.roll(a, 1), np.roll(a, 2048)):
        assert abs(np.corrcoef(a, other)[0, 1]) < 5e-3
    assert np.bincount(((a + 1) * 8).astype(int), minlength=16).std() < 1000


def test_launches_choose_vectors_and_flatten_contiguous_rows():
    def fill(dst=0, num_rows=4, row_len=64, dtype=DType.BF16, **options):
        return fill_launches(
            dst, dtype, key=1, base=0.0, scale=1.0, num_rows=num_rows, row_len=row_len, **options
        )

    assert fill(num_rows=0) == []
    assert fill()[0].spec.template_args == ("__nv_bfloat16", "8")
    assert fill(dtype=DType.F32)[0].spec.template_args == ("float", "4")
    assert fill(num_rows=2048, row_len=1)[0].spec.template_args[1] == "8"  # a norm's weight
    assert fill(dst=2)[0].spec.template_args[1] == "1"
    assert fill(row_len=12, pitch=16)[0].spec.template_args[1] == "1"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.F32])
@pytest.mark.parametrize(
    ("num_rows", "row_len", "pitch", "group", "num_parts", "part"),
    [
        (1, 1, 1, 0, 1, 0),
        (1000, 576, 576, 0, 1, 0),
        (5, 577, 600, 0, 1, 0),
        (32, 72, 72, 8, 2, 0),
        (32, 72, 80, 8, 2, 1),
        (9, 7, 7, 3, 3, 2),
    ],
)
def test_kernel_writes_the_same_bits(
    device, stream, dtype, num_rows, row_len, pitch, group, num_parts, part
):
    from tinyvllm.driver.kernel import KernelLoader
    from tinyvllm.driver.memory import copy_to_device, copy_to_host
    from tinyvllm.memory.pool import DevicePool

    bits = np.empty((num_rows * num_parts + 1, pitch), dtype.storage)
    bits.view(np.uint8)[...] = 0xFF
    want = bits.copy()
    values = dtype.encode(dummy_values(77, 0, num_rows * row_len, 0.25, 1e-3))
    for r in range(num_rows):
        row = r if not group else (r // group) * group * num_parts + part * group + r % group
        want[row, :row_len] = values[r * row_len : (r + 1) * row_len]
    pool, loader = DevicePool(device, 1 << 30), KernelLoader(device)
    ptr = pool.alloc(bits.nbytes, stream)
    try:
        copy_to_device(ptr, bits, stream)
        for launch in fill_launches(
            ptr,
            dtype,
            key=77,
            base=0.25,
            scale=1e-3,
            num_rows=num_rows,
            row_len=row_len,
            pitch=pitch,
            group=group,
            num_parts=num_parts,
            part=part,
        ):
            loader.prepare(launch).run(stream)
        copy_to_host(bits, ptr, stream)
        stream.synchronize()
    finally:
        pool.free(ptr, stream)
        stream.synchronize()
        loader.close()
        pool.close()
    # As bytes: what must stay untouched is NaN in the floating types.
    np.testing.assert_array_equal(bits.view(np.uint8), want.view(np.uint8))
