"""Who is served first: orders of the requests, as pure functions of a request."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tinyvllm.engine.request import Request
from tinyvllm.util import InputError

# Sorts requests, the next one first. What it returns may not change while a request waits.
Order = Callable[[Request], Any]

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
POLICIES: dict[str, Order] = {"fcfs": fcfs, "priority": urgency, "shortest": shortest}


def order_of(scheduling_policy: str) -> Order:
    """The order under a policy: of POLICIES, or a function elsewhere, named `module:function`.

    Raises InputError if that cannot be imported.
    """
    if scheduling_policy in POLICIES:
        return POLICIES[scheduling_policy]
    module, _, function = scheduling_policy.partition(":")
    where = f"scheduling_policy={scheduling_policy!r}"
    try:
        order: Order | None = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise InputError(f"{where}: {error}; is its folder on PYTHONPATH?") from error
    if not callable(order):
        raise InputError(f"{where}: {module} has no function {function}")
    return order
