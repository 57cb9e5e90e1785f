"""Log-probabilities of given tokens, their ranks, and the most likely tokens of each row."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import DType

LOGPROBS = Kernel(
    "logprobs.cu",
    "logprobs_kernel",
    "ptr logits, ptr targets, ptr target_logprob, ptr target_rank, ptr top_ids, "
    "ptr top_logprobs, i32 vocab, i32 num_top",
    pdl=True,
)
THREADS = 1024


class Logprobs(OpDef):
    """Log-softmax of raw logits at the targets and at the P best tokens of each row.

    A target's rank is 1 plus the number of logits above its own. The best come first, equal ones
    by index. NaN logits count as -infinity. P is at most V.
    """

    name = "logprobs"
    reads = {"logits": ("S", "V"), "targets": ("S",)}
    writes = {
        "target_logprob": ("S",),
        "target_rank": ("S",),
        "top_ids": ("S", "P"),
        "top_logprobs": ("S", "P"),
    }
    out_dtypes = {
        "target_logprob": DType.F32,
        "target_rank": DType.I32,
        "top_ids": DType.I32,
        "top_logprobs": DType.F32,
    }

    def reference(self, a: Operands) -> None:
        num_top = a.top_ids.shape[1]
        for s, target in enumerate(a.targets):
            # Order and rank go by the logits: rounding makes some of their log-softmax equal.
            row = np.where(np.isnan(a.logits[s]), np.float32(-np.inf), a.logits[s])
            with np.errstate(invalid="ignore"):  # infinity - infinity: no finite logit, or a +inf
                logprobs = row - row.max()
                logprobs -= np.log(np.exp(logprobs).sum())
            a.target_logprob[s] = logprobs[target]
            a.target_rank[s] = np.count_nonzero(row > row[target]) + 1
            a.top_ids[s] = _top(row, num_top)
            a.top_logprobs[s] = logprobs[a.top_ids[s]]

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        assert a.logits.contiguous
        S, V = a.logits.shape
        num_top = a.top_ids.shape[1]
        assert num_top <= V, f"the {num_top} best of {V} logits"
        if S == 0:
            return []
        aligned = V % 4 == 0 and a.logits.ptr % 16 == 0
        return [
            LOGPROBS(aligned).launch(
                (S,),
                THREADS,
                logits=a.logits.ptr,
                targets=a.targets.ptr,
                target_logprob=a.target_logprob.ptr,
                target_rank=a.target_rank.ptr,
                top_ids=a.top_ids.ptr,
                top_logprobs=a.top_logprobs.ptr,
                vocab=V,
                num_top=num_top,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        S, V = a.logits.shape
        outputs = nbytes(a.target_logprob, a.target_rank, a.top_ids, a.top_logprobs)
        return Cost(nbytes(a.logits, a.targets) + outputs, 4 * S * V)


def _top(row: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, largest first and equal ones by index."""
    assert count <= row.size, f"the {count} best of {row.size} logits"
    threshold = np.partition(row, row.size - count)[row.size - count]
    candidates = np.flatnonzero(row >= threshold)  # more than `count` if some equal the threshold
    return candidates[np.argsort(-row[candidates], kind="stable")[:count]]
