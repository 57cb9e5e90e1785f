"""The tiles of matmul_large.cu, each by itself."""

from dataclasses import replace

import numpy as np
import pytest
from harness import check_cuda, run_cuda
from test_matmul import gated_product, product, random_arrays, residual_product

from tinyvllm.ops import matmul_choice
from tinyvllm.ops.lower import lower
from tinyvllm.ops.matmul_tiles import LARGE_US
from tinyvllm.util import DType


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("tile", LARGE_US, ids=lambda t: f"{t.rows}x{t.cols}_k{t.depth}")
def test_large_tiles(device, monkeypatch, tile, act):
    """Each tile with each epilogue, ragged at all edges, several tiles to a block; repeatable."""
    if tile.smem > device.info.smem_per_block:
        pytest.skip("needs more shared memory")
    monkeypatch.setattr(device, "info", replace(device.info, kernel_path="portable", num_sms=3))
    monkeypatch.setattr(matmul_choice, "LARGE_US", {tile: LARGE_US[tile]})
    for M, N, K in (
        (2 * tile.rows + 37, 2 * tile.cols + 41, 2 * tile.depth * tile.stages + 8),
        (tile.rows - 1, 2 * tile.cols + 16, 8),
    ):
        program = product(N, K, dtype=DType.F32)
        arrays = random_arrays(program, M)
        dims, limits = {"T": M}, {"T": M + 5}
        first, again = (run_cuda(device, program, dims, arrays, act, limits)["y"] for _ in "12")
        x, w = (act.round(arrays[n]).astype(float) for n in ("x", "w"))
        assert (np.abs(first - x @ w.T) <= 1e-5 * (np.abs(x) @ np.abs(w).T)).all()
        np.testing.assert_array_equal(again, first)
        for build, cols in ((residual_product, N), (gated_product, (N + 7) // 8 * 8)):
            program = build(cols, K, bias=True)
            arrays = random_arrays(program, M)
            check_cuda(device, program, lower(program, "prefill"), dims, arrays, act, limits)
