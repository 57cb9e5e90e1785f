"""Who is served first: orders of the requests, as pure functions of a request."""

from __future__ import annotations

from collections.abc import Callable

from tinyvllm.engine.request import Request

AGEING = 16  # tokens by which a prompt counts as shorter for each step that it has waited


def urgency(request: Request) -> tuple[int, int]:
    """Ascending from the most urgent; the last of the running requests is preempted first."""
    return request.priority, request.arrival


def fcfs(request: Request) -> tuple[int, int]:
    """First come, first served."""
    return 0, request.arrival


def shortest(request: Request) -> tuple[int, int]:
    """Fewest tokens to compute first, less `AGEING` tokens for each step waited.

    At step t a request that came at step a ranks by `num_tokens - AGEING * (t - a)`. The term
    `-AGEING * t` is common to all, so the order between two requests never changes while they
    wait, and the key leaves it out. A prompt of n tokens is overtaken only by requests that come
    within n / AGEING steps after it, so it cannot starve.
    """
    return request.num_tokens + AGEING * request.arrival_step, request.arrival


# The order of the waiting requests under each `scheduling_policy`.
POLICIES: dict[str, Callable[[Request], tuple[int, int]]] = {
    "fcfs": fcfs,
    "priority": urgency,
    "shortest": shortest,
}
