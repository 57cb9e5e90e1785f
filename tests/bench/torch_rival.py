"""PyTorch's kernels (cuBLAS, cuDNN) on the same arrays, for `tinyvllm bench ... --rival FILE`."""

import itertools
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyvllm.bench.timing import WARMUP_REPLAYS
from tinyvllm.util import DType


def open_rival(index):
    """PyTorch on GPU number `index`, in the primary context that it shares with our kernels."""
    torch.cuda.set_device(index)
    return Torch()


class Torch:
    def tensor(self, array):
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
        tensor = torch.as_tensor(holder, device="cuda")
        kinds = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
        return tensor.view(kinds.get(array.dtype, torch.int32))

    def products(self, x, weights, replays):
        """Time of one x weight^T by cuBLAS, when those of all weights follow each other."""
        left, tensors = self.tensor(x), [self.tensor(weight) for weight in weights]
        out = left.new_empty(x.shape[0], weights[0].shape[0])

        def run():
            for weight in tensors:
                torch.mm(left, weight.T, out=out)

        return self._graph(run, len(tensors), replays)

    def unpaged(self, q, kv_cache, block_tables, length):
        """q, k and v [batch, heads, length, head_dim] as PyTorch has them."""
        kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[-1]
        batch = block_tables.shape[1]
        queries = self.tensor(q).view(batch, length, -1, head_dim).transpose(1, 2)
        cache, tables = self.tensor(kv_cache), self.tensor(block_tables)[0].long()
        k, v = (
            cache[tables, 0, part]  # [batch, blocks, KV heads, places, head_dim]
            .permute(0, 2, 1, 3, 4)
            .reshape(batch, kv_heads, -1, head_dim)[:, :, :length]
            .contiguous()
            for part in (0, 1)
        )
        return queries, k, v

    def attention(self, q, kv_cache, block_tables, length, count, replays):
        """Time of causal attention by cuDNN, K and V of a head in one piece."""
        q, k, v = self.unpaged(q, kv_cache, block_tables, length)

        def run():
            for _ in range(count):
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self._graph(run, count, replays)

    def _graph(self, run, count, replays):
        """Times a graph of what `run` does, as `replay_seconds` does; of one of `count` parts."""
        cuda = torch.cuda
        run()  # libraries choose and load their kernels
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()

        def seconds():
            events = [cuda.Event(enable_timing=True) for _ in range(WARMUP_REPLAYS + replays + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            cuda.synchronize()
            times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
            return statistics.median(times[WARMUP_REPLAYS:]) / 1e3 / count

        return seconds
