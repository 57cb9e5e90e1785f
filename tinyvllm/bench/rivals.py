"""PyTorch's kernels (cuBLAS, cuDNN) on the same arrays, for benchmarks that are asked to compare.

PyTorch is no dependency: it is imported here alone, and only when asked for.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tinyvllm.bench.timing import WARMUP_REPLAYS
from tinyvllm.memory.array import DeviceArray
from tinyvllm.util import DType, InputError

Seconds = Callable[[], float]


class Torch:
    """PyTorch on one GPU, in the primary context that it shares with our kernels.

    InputError if it is not installed.
    """

    def __init__(self, index: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise InputError(
                f"--torch compares with PyTorch, which is not here: {error}"
            ) from error
        torch.cuda.set_device(index)
        self._torch: Any = torch

    def tensor(self, array: DeviceArray) -> Any:
        """The array's memory as a tensor, without a copy."""
        assert array.contiguous
        integers = {DType.BF16: "<i2", DType.FP16: "<i2", DType.I32: "<i4"}
        interface = {
            "shape": array.shape,
            "typestr": integers[array.dtype],
            "data": (array.ptr, False),
            "version": 3,
        }
        holder = type("Holder", (), {"__cuda_array_interface__": interface})()
        tensor = self._torch.as_tensor(holder, device="cuda")
        kinds = {DType.BF16: self._torch.bfloat16, DType.FP16: self._torch.float16}
        return tensor.view(kinds.get(array.dtype, self._torch.int32))

    def products(self, x: DeviceArray, weights: Sequence[DeviceArray], replays: int) -> Seconds:
        """Time of one x weight^T by cuBLAS, when those of all weights follow each other."""
        left, tensors = self.tensor(x), [self.tensor(weight) for weight in weights]
        out = left.new_empty(x.shape[0], weights[0].shape[0])

        def run() -> None:
            for weight in tensors:
                self._torch.mm(left, weight.T, out=out)

        return self._graph(run, len(tensors), replays)

    def attention(self, q: Any, k: Any, v: Any, count: int, replays: int) -> Seconds:
        """Time of causal attention by cuDNN. q [rows, heads, tokens, head_dim], k and v alike."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attend = self._torch.nn.functional.scaled_dot_product_attention

        def run() -> None:
            for _ in range(count):
                attend(q, k, v, is_causal=True, enable_gqa=True)

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self._graph(run, count, replays)

    def _graph(self, run: Callable[[], None], count: int, replays: int) -> Seconds:
        """Times a graph of what `run` does, as `replay_seconds` does; of one of `count` parts."""
        cuda = self._torch.cuda
        run()  # libraries choose and load their kernels
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()

        def seconds() -> float:
            events = [cuda.Event(enable_timing=True) for _ in range(WARMUP_REPLAYS + replays + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            cuda.synchronize()
            times: list[float] = [
                start.elapsed_time(end) for start, end in itertools.pairwise(events)
            ]
            return statistics.median(times[WARMUP_REPLAYS:]) / 1e3 / count

        return seconds


def in_turns(runs: Sequence[Seconds], rounds: int) -> list[float]:
    """The median of each of several times, taken in turns: the card's clock depends on its past."""
    times = [[run() for run in runs] for _ in range(rounds)]
    return [statistics.median(of_one) for of_one in zip(*times, strict=True)]
