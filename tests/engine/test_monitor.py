"""When the log line and the warning come, and what they say."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
from driving import make_scheduler

from tinyvllm.engine.monitor import LOG_INTERVAL, Monitor, log_line, swap_is_bottleneck
from tinyvllm.engine.request import Request
from tinyvllm.engine.stats import SwapUsage
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.pool import PoolStats
from tinyvllm.sampling_params import SamplingParams

GIB = 1 << 30
POOL = PoolStats(3 * GIB, 4 * GIB, 2 * GIB, 3 * GIB, budget=10 * GIB, threshold=9 * GIB)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def scheduler():
    return make_scheduler(BlockManager(100, 16), seqs=8, budget=256, max_len=512)


@pytest.fixture
def monitored(scheduler):
    """Makes a monitor of the scheduler, and its clock."""

    def make(log=True):
        clock = Clock()
        backend = SimpleNamespace(pool_stats=lambda: POOL)
        return Monitor(scheduler, backend, log=log, clock=clock), clock

    return make


def lines(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_a_line_each_interval_while_something_runs(monitored, caplog):
    caplog.set_level(logging.INFO, "tinyvllm")
    monitor, clock = monitored()
    clock.now += 1000  # loading, or waiting for the first request
    monitor.resumed()
    for _ in range(25):
        clock.now += 1
        monitor.stepped()
    assert len(lines(caplog, logging.INFO)) == 2
    clock.now += 1000  # nothing ran
    monitor.resumed()
    monitor.stepped()
    assert len(lines(caplog, logging.INFO)) == 2
    clock.now += LOG_INTERVAL - 5
    monitor.stepped()
    assert len(lines(caplog, logging.INFO)) == 3


def test_no_line_and_no_warning_when_it_is_off(scheduler, caplog):
    caplog.set_level(logging.INFO, "tinyvllm")
    clock, no_backend = Clock(), SimpleNamespace()  # no snapshot is made, either
    monitor = Monitor(scheduler, no_backend, log=False, clock=clock)
    monitor.resumed()
    clock.now += 3 * LOG_INTERVAL
    scheduler.blocks.allocate(99)
    monitor.stepped()
    assert not caplog.records


def test_one_warning_each_time_that_blocks_run_low(scheduler, monitored, caplog):
    monitor, _ = monitored()
    blocks = scheduler.blocks

    def leave(count):
        if blocks.num_free > count:
            taken.extend(blocks.allocate(blocks.num_free - count))
        while blocks.num_free < count:
            blocks.free([taken.pop()])
        monitor.stepped()
        return len(lines(caplog, logging.WARNING))

    taken = []
    assert leave(10) == 0, "10 % are enough"
    assert leave(9) == 1
    assert "9 of 100 blocks are left (9.0 %" in lines(caplog, logging.WARNING)[0]
    assert leave(3) == leave(12) == leave(9) == leave(14) == leave(2) == 1
    assert leave(15) == 1
    assert leave(9) == 2


def test_cached_blocks_are_left_too(scheduler, monitored, caplog):
    monitor, _ = monitored()
    taken = scheduler.blocks.allocate(100)
    scheduler.blocks.keep(taken[:10])
    scheduler.blocks.free(taken[:10])
    monitor.stepped()
    assert not caplog.records


def test_steps_are_counted(scheduler, monitored):
    monitor, _ = monitored()
    monitor.resumed()
    parent = Request("a", [1] * 300, SamplingParams(max_tokens=3))
    scheduler.add(parent)
    scheduler.add(Request("a.1", [1] * 300, SamplingParams(max_tokens=3), parent=parent, index=1))
    scheduler.add(Request("b", [2] * 5, SamplingParams(max_tokens=3)))
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        monitor.launched(step)
        scheduler.update(step, [0] * len(step.sampling_rows))
    stats = monitor.stats()
    assert stats.prompt_tokens == 305
    assert stats.prefill_tokens == 300 + 1 + 5
    assert stats.generation_tokens == 9
    assert stats.num_steps == monitor.num_steps > 3


@pytest.mark.parametrize("enabled", [True, False])
def test_tokens_found_in_the_prefix_cache_are_counted_if_there_is_one(enabled):
    scheduler = make_scheduler(
        BlockManager(20, 4), seqs=8, budget=64, max_len=64, enable_prefix_caching=enabled
    )
    monitor = Monitor(scheduler, SimpleNamespace(pool_stats=lambda: POOL), log=False)
    for name in "ab":
        scheduler.add(Request(name, [1] * 10, SamplingParams(max_tokens=1)))
        step = scheduler.schedule()
        scheduler.update(step, [0])
    stats = monitor.stats()
    found = (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prefix_cache_hit_rate)
    assert found == ((20, 8, 0.4) if enabled else (0, 0, 0.0))


def snapshots(monitor, **changes):
    last = monitor.stats()
    swap = SwapUsage(
        total_bytes=4 * GIB, pinned_bytes=GIB, used_bytes=GIB // 2, out_bytes=30 * 10**9,
        in_bytes=20 * 10**9, out_seconds=0.6, in_seconds=0.5, plain_out_rate=55.2e9,
        plain_in_rate=55.1e9,
    )  # fmt: skip
    now = dataclasses.replace(
        last,
        prefill_tokens=2000,
        generation_tokens=500,
        num_requests_running=3,
        num_requests_waiting=2,
        num_requests_swapped=1,
        kv_blocks_used=50,
        kv_slots_used=800,
        kv_slots_empty=16,
        prefix_cache_queries=100,
        prefix_cache_hits=25,
        num_preemptions_swap=4,
        num_preemptions_recompute=5,
        swap=swap,
    )
    return last, dataclasses.replace(now, **changes)


def test_what_a_line_says(monitored):
    monitor, _ = monitored()
    assert log_line(*snapshots(monitor), 10.0) == (
        "Avg prompt throughput: 200.0 tokens/s, Avg generation throughput: 50.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, Swapped: 1 reqs, KV cache usage: 50.0%, "
        "Fragmentation: 2.0%, Prefix cache hit rate: 25.0%, "
        "Pool: 2.00 GiB used of 3.00 GiB reserved, peak 4.00 GiB, "
        "Swap out / in: 50.0 / 40.0 GB/s of 55.2 / 55.1, 512.00 MiB of 4.00 GiB used, "
        "Preemptions: 4 swap, 5 recompute"
    )
    _, now = snapshots(monitor)
    later = dataclasses.replace(
        now,
        prefill_tokens=2300,
        generation_tokens=600,
        swap=dataclasses.replace(now.swap, in_bytes=25 * 10**9, in_seconds=0.75),
    )
    line = log_line(now, later, 10.0)
    assert "prompt throughput: 30.0 tokens/s, Avg generation throughput: 10.0 tokens/s" in line
    assert "Swap out / in: 0.0 / 20.0 GB/s" in line, "of the interval alone"
    idle = log_line(*[monitor.stats()] * 2, 10.0)
    assert "Swap out" not in idle and "Preemptions" not in idle


@pytest.mark.parametrize(
    ("seconds", "swapped", "said"), [(1.3, 1, True), (1.3, 0, False), (1.4, 1, False)]
)
def test_the_bottleneck_is_the_link_when_it_is_busy_and_waited_for(
    monitored, seconds, swapped, said
):
    """Copies of 1.1 seconds in the interval."""
    monitor, _ = monitored()
    last, now = snapshots(monitor, num_requests_swapped=swapped)
    assert swap_is_bottleneck(last, now, seconds) is said
    assert ("swap bandwidth is the bottleneck" in log_line(last, now, seconds)) is said
