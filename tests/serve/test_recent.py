"""Quantiles of the last minute: how exact, and how long a time counts."""

import random

import numpy as np
import pytest

from tinyvllm.serve.recent import HALF_S, LEAST, MOST, Recent


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_quantiles_are_within_a_hundredth():
    rng = random.Random(1)
    times = [rng.lognormvariate(-4, 2) for _ in range(3000)]
    recent = Recent()
    for value in times:
        recent.observe(value)
    count, found = recent.quantiles(0.5, 0.99)
    assert count == 3000
    assert found == pytest.approx(
        np.quantile(times, [0.5, 0.99], method="inverted_cdf").tolist(), rel=0.0101
    )


def test_times_count_as_often_as_they_were_and_limits_hold():
    recent = Recent()
    assert recent.quantiles(0.5) == (0, [])
    recent.observe(0.0, 99)
    recent.observe(1e9)
    count, (median, most) = recent.quantiles(0.5, 1.0)
    assert count == 100
    assert (median, most) == (pytest.approx(LEAST), pytest.approx(MOST, rel=0.01))


def test_what_is_older_than_a_minute_is_forgotten():
    clock = Clock()
    recent = Recent(clock)
    recent.observe(1.0)
    clock.now += HALF_S + 1
    recent.observe(2.0)
    assert recent.quantiles(0.5)[0] == 2
    clock.now += HALF_S - 1
    assert recent.quantiles(0.5) == (1, [pytest.approx(2.0, rel=0.01)])
    clock.now += 3 * HALF_S
    assert recent.quantiles(0.5) == (0, [])
