"""Tensor maps as the GPU reads them: encoded once for each matrix, whichever launches use it."""

from __future__ import annotations

import struct
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from tinyvllm.driver.calls import call, driver_api
from tinyvllm.driver.spec import TensorMap
from tinyvllm.util import DType, InputError

MAX_KEPT = 4096  # encoded maps: several for each buffer and weight of a model
MAX_BOX = 256  # elements along a side

_DTYPES = {DType.BF16: "BFLOAT16", DType.FP16: "FLOAT16", DType.F32: "FLOAT32", DType.I32: "INT32"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_maps: dict[bytes, TensorMap] = {}  # by their encoding, for `described`


@lru_cache(MAX_KEPT)
def encode(m: TensorMap) -> bytes:
    """The 128 bytes of a CUtensorMap. Raises InputError for a map that breaks TensorMap's rules."""
    _check(m)
    cu = driver_api()
    kind = getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[m.dtype]}")
    swizzle = getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[m.swizzle]}")
    encoded = call(
        "cuTensorMapEncodeTiled",
        kind,
        2,  # axes; lists name the fastest first
        m.ptr,
        [cu.cuuint64_t(m.cols), cu.cuuint64_t(m.rows)],
        [cu.cuuint64_t(m.row_stride * m.dtype.itemsize)],
        [cu.cuuint32_t(m.box_cols), cu.cuuint32_t(m.box_rows)],
        [cu.cuuint32_t(1), cu.cuuint32_t(1)],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    image = struct.pack("<16Q", *(int(word) for word in encoded.opaque))
    while len(_maps) >= MAX_KEPT:
        _maps.pop(next(iter(_maps)))
    _maps[image] = m
    return image


def described(image: bytes) -> dict[str, Any] | str:
    """What an encoded map says, by TensorMap's names."""
    if image not in _maps:
        return f"<{len(image)} bytes>"
    m = _maps[image]
    return {**asdict(m), "ptr": hex(m.ptr), "dtype": m.dtype.name.lower()}


def _check(m: TensorMap) -> None:
    """The driver would only say "invalid value"."""
    row_bytes, box_bytes = m.row_stride * m.dtype.itemsize, m.box_cols * m.dtype.itemsize
    rules = {
        f"the address {m.ptr:#x} must be a multiple of 16": m.ptr % 16 == 0,
        f"rows {row_bytes} bytes apart: must be a multiple of 16": row_bytes % 16 == 0,
        f"{m.cols} columns in rows {m.row_stride} apart": 1 <= m.cols <= m.row_stride,
        f"rows={m.rows} must be from 1 to {2**32}": 1 <= m.rows <= 2**32,
        f"a box of {m.box_rows} x {m.box_cols}: sides must be from 1 to {MAX_BOX}": (
            1 <= m.box_rows <= MAX_BOX and 1 <= m.box_cols <= MAX_BOX
        ),
        f"swizzle={m.swizzle} must be one of {sorted(_SWIZZLES)}": m.swizzle in _SWIZZLES,
        f"box rows of {box_bytes} bytes: must be a multiple of 16, and with swizzle={m.swizzle} "
        "no longer than that": box_bytes % 16 == 0 and not 0 < m.swizzle < box_bytes,
    }
    for rule, kept in rules.items():
        if not kept:
            raise InputError(f"tensor map: {rule}")
