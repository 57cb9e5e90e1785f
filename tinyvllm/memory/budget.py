"""The memory plan: what goes where on the device, and how many KV blocks fit, in one function."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm.util import InputError, format_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part; weights, arenas, state, KV and temporaries fit under `threshold`.

    `budget` is what the pool may hand out and `threshold` what it keeps reserved when memory is
    freed, so that nothing is returned to the driver, or asked of it, in the middle of a step.
    """

    free: int
    gpu_memory_utilization: float
    budget: int
    release_threshold: float
    threshold: int
    weights: int
    arenas: int
    state: int
    temporaries: int
    block_bytes: int
    num_blocks: int

    @property
    def kv(self) -> int:
        """Bytes of the KV blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def unused(self) -> int:
        """Bytes under the threshold that nothing needs; negative when the plan does not fit."""
        return self.threshold - self.fixed - self.kv

    @property
    def fixed(self) -> int:
        """Bytes of everything but the KV blocks."""
        return self.weights + self.arenas + self.state + self.temporaries

    def table(self) -> str:
        """What goes where: a line for each part with its share of the threshold, and then what
        that is a share of."""
        blocks = f"{self.num_blocks} blocks of {format_bytes(self.block_bytes)}"
        parts = [
            ("weights", self.weights, ""),
            ("arenas", self.arenas, "buffers of a step"),
            ("state", self.state, "rows and block tables"),
            ("temporaries", self.temporaries, "largest step"),
            ("KV blocks", self.kv, blocks),
            ("unused", self.unused, ""),
            (
                "threshold",
                self.threshold,
                f"release_threshold={self.release_threshold} of the budget",
            ),
            (
                "budget",
                self.budget,
                f"gpu_memory_utilization={self.gpu_memory_utilization} of free",
            ),
            ("free", self.free, "on the device at start"),
        ]
        lines = []
        for name, size, note in parts:
            share = "" if name in ("budget", "free") else f"{size / max(self.threshold, 1):.1%}"
            lines.append(f"{name:<12}{format_bytes(size):>12}{share:>9}  {note}".rstrip())
        return "\n".join(lines)


def plan_memory(
    *,
    free_bytes: int,
    gpu_memory_utilization: float,
    release_threshold: float,
    weights_bytes: int,
    arena_bytes: int,
    state_bytes: int,
    temporary_bytes: int,
    block_bytes: int,
    min_blocks: int = 1,
    max_blocks_useful: int | None = None,
    override: int | None = None,
) -> MemoryPlan:
    """Sizes the KV cache from what the other parts leave of the pool's release threshold.

    At most `max_blocks_useful` blocks are planned (no more could ever be referenced), or exactly
    `override` if given. Raises InputError with the table when `min_blocks`, or the override, do
    not fit.
    """
    budget = int(free_bytes * gpu_memory_utilization)
    threshold = int(budget * release_threshold)
    left = threshold - weights_bytes - arena_bytes - state_bytes - temporary_bytes
    fitting = max(0, left // block_bytes)
    wanted = min_blocks if override is None else override
    if override is not None:
        num_blocks = override
    elif max_blocks_useful is not None:
        num_blocks = max(min_blocks, min(fitting, max_blocks_useful))
    else:
        num_blocks = max(min_blocks, fitting)
    plan = MemoryPlan(
        free=free_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        budget=budget,
        release_threshold=release_threshold,
        threshold=threshold,
        weights=weights_bytes,
        arenas=arena_bytes,
        state=state_bytes,
        temporaries=temporary_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
    )
    if wanted > fitting:
        raise InputError(
            f"the model does not fit: {wanted} KV blocks are needed, and "
            f"{format_bytes(-plan.unused)} are missing\n{plan.table()}\n{_advice(plan, override)}"
        )
    return plan


def _advice(plan: MemoryPlan, override: int | None) -> str:
    if plan.weights > plan.free:
        return "The weights alone exceed the free memory: use a smaller model or a larger GPU."
    advice = (
        "Lower max_num_batched_tokens or max_num_seqs (arenas, state, temporaries) or "
        "max_model_len (KV blocks), or free memory that other programs hold on this GPU"
    )
    if override is not None:
        advice = f"Lower num_gpu_blocks_override (now {override}). " + advice
    if plan.gpu_memory_utilization < 1:
        advice = f"Raise gpu_memory_utilization (now {plan.gpu_memory_utilization}). " + advice
    return advice + "."
