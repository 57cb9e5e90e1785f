"""Static buffer reuse: from each buffer's first and last use to offsets in one arena.

Four rules, each marked where it is applied:

1. find the last use of every buffer (`lifetimes` in ops/executor.py);
2. check that nothing reads it later (`check_reads` there);
3. from then on its region is free (`_place`);
4. a new buffer takes the free region closest to it in size (`_best_fit`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinyvllm.util import align_up

ALIGNMENT = 256  # bytes; what CUDA allocations give, and enough for any vector or TMA access
MAX_ATTEMPTS = 8


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes, written first by step `first` and read last by step `last`.

    Buffers of one `role` (the same buffer of different layers) and size share one offset; without
    a role a buffer is placed by itself.
    """

    name: str
    size: int
    first: int
    last: int
    role: str = ""


@dataclass(frozen=True)
class Plan:
    """Where each buffer lies in the arena, and how good that is. All sizes in bytes."""

    offsets: dict[str, int]
    arena_bytes: int
    bytes_without_reuse: int
    lower_bound: int  # largest sum of simultaneously live buffers


@dataclass
class _Group:
    """Buffers of equal size, never alive at the same step, that lie at one offset."""

    size: int
    members: list[Lifetime]
    offset: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.size

    def alive_with(self, other: _Group) -> bool:
        return any(_overlap(a, b) for a in self.members for b in other.members)


def plan_buffers(lifetimes: Iterable[Lifetime]) -> Plan:
    """Assigns offsets so that buffers alive at the same step never overlap.

    A buffer that is still used by step i is alive during i, so a step's outputs never share
    memory with its inputs. The largest are placed first: small buffers then fill the gaps between
    them, which in the order of the program would be cut up by small ones. Each takes the free
    region closest to its size (best fit). While that needs more than the lower bound, the largest
    that reaches beyond it is placed first in another attempt.
    """
    lives = [
        Lifetime(b.name, align_up(max(b.size, 1), ALIGNMENT), b.first, b.last, b.role)
        for b in lifetimes
    ]
    for b in lives:
        assert b.first <= b.last, f"{b.name} is used at {b.last} before it is written at {b.first}"
    bound = _lower_bound(lives)
    order = sorted(_groups(lives), key=lambda g: (-g.size, g.members[0].first, g.members[0].name))
    offsets: dict[str, int] = {}
    arena_bytes = 0
    for _ in range(MAX_ATTEMPTS):
        top = _place(order)
        if not offsets or top < arena_bytes:
            offsets = {b.name: group.offset for group in order for b in group.members}
            arena_bytes = top
        if arena_bytes == bound:
            break
        first = max((g for g in order if g.end > bound), key=lambda g: g.size)
        order.remove(first)
        order.insert(0, first)
    return Plan(offsets, arena_bytes, sum(b.size for b in lives), bound)


def _groups(lives: list[Lifetime]) -> list[_Group]:
    """One group for each role and size; a buffer alive together with another of them is apart."""
    groups: dict[tuple[str, int], _Group] = {}
    for b in sorted(lives, key=lambda b: b.first):
        group = groups.setdefault((b.role or b.name, b.size), _Group(b.size, []))
        if any(_overlap(b, other) for other in group.members):
            groups[b.name, -1] = _Group(b.size, [b])
        else:
            group.members.append(b)
    return list(groups.values())


def _place(order: list[_Group]) -> int:
    """Gives the groups offsets, in this order; returns the size of the arena."""
    for i, new in enumerate(order):
        # Rule 3: what is not alive together with the new one does not take any room from it.
        taken = sorted((g.offset, g.end) for g in order[:i] if g.alive_with(new))
        new.offset = _best_fit(taken, new.size)
    return max((g.end for g in order), default=0)


def _best_fit(taken: list[tuple[int, int]], size: int) -> int:
    """Start of the gap between taken regions that is closest in size, else behind all of them."""
    gaps, end = [], 0
    for start, stop in taken:
        if start - end >= size:
            gaps.append((start - end, end))
        end = max(end, stop)
    # Rule 4: the smallest gap that is large enough.
    return min(gaps)[1] if gaps else end


def _overlap(a: Lifetime, b: Lifetime) -> bool:
    return a.first <= b.last and b.first <= a.last


def _lower_bound(lives: list[Lifetime]) -> int:
    """Largest number of bytes alive at one step; no assignment of offsets can be smaller."""
    changes: dict[int, int] = {}
    for b in lives:
        changes[b.first] = changes.get(b.first, 0) + b.size
        changes[b.last + 1] = changes.get(b.last + 1, 0) - b.size
    alive = peak = 0
    for step in sorted(changes):
        alive += changes[step]
        peak = max(peak, alive)
    return peak
