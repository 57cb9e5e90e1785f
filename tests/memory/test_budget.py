import pytest

from tinyvllm.memory.budget import plan_memory
from tinyvllm.util import InputError

MIB, GIB = 1 << 20, 1 << 30

SIZES = {
    "free_bytes": 100 * GIB,
    "gpu_memory_utilization": 0.5,
    "release_threshold": 0.8,
    "weights_bytes": 10 * GIB,
    "arena_bytes": 2 * GIB,
    "state_bytes": 1 * GIB,
    "temporary_bytes": 3 * GIB,
    "block_bytes": 512 << 10,
}


def test_kv_takes_what_is_left_under_the_threshold():
    plan = plan_memory(**SIZES)
    assert (plan.budget, plan.threshold) == (50 * GIB, 40 * GIB)
    assert plan.num_blocks == 24 * GIB // (512 << 10)
    assert plan.fixed + plan.kv <= plan.threshold
    assert plan.threshold - plan.fixed - plan.kv < plan.block_bytes


def test_no_more_blocks_than_are_useful():
    assert plan_memory(**SIZES, max_blocks_useful=100).num_blocks == 100
    assert plan_memory(**SIZES, max_blocks_useful=10**9).num_blocks == 24 * 2048


def test_no_fewer_blocks_than_are_needed():
    assert plan_memory(**SIZES, min_blocks=5, max_blocks_useful=3).num_blocks == 5


def test_override_is_taken_exactly():
    assert plan_memory(**SIZES, override=7, max_blocks_useful=3).num_blocks == 7
    with pytest.raises(InputError, match="49153 KV blocks"):
        plan_memory(**SIZES, override=24 * 2048 + 1)


def test_smallest_plan_that_fits_and_one_byte_less():
    fixed = 16 * GIB
    exact = {**SIZES, "free_bytes": fixed + 3 * MIB, "block_bytes": MIB}
    exact |= {"gpu_memory_utilization": 1.0, "release_threshold": 1.0}
    plan = plan_memory(**exact, min_blocks=3)
    assert plan.num_blocks == 3 and plan.unused == 0
    exact["free_bytes"] -= 1
    with pytest.raises(InputError):
        plan_memory(**exact, min_blocks=3)
    assert plan_memory(**exact, min_blocks=2).num_blocks == 2


def test_error_shows_the_table_and_what_to_change():
    with pytest.raises(InputError) as caught:
        plan_memory(**{**SIZES, "weights_bytes": 60 * GIB}, min_blocks=2)
    text = str(caught.value)
    assert "2 KV blocks are needed, and 26.00 GiB are missing" in text
    assert "weights" in text and "60.00 GiB" in text
    assert "gpu_memory_utilization (now 0.5)" in text and "max_model_len" in text
    assert "num_gpu_blocks_override" not in text


def test_advice_is_of_what_can_be_changed():
    whole = {**SIZES, "free_bytes": GIB, "gpu_memory_utilization": 1.0, "weights_bytes": MIB}
    with pytest.raises(InputError, match=r"num_gpu_blocks_override \(now 7\)") as caught:
        plan_memory(**whole, override=7)
    assert "Raise" not in str(caught.value)
    with pytest.raises(InputError, match="use a smaller model"):
        plan_memory(**{**SIZES, "free_bytes": 0})


def test_weights_larger_than_the_device():
    with pytest.raises(InputError, match="smaller model"):
        plan_memory(**{**SIZES, "weights_bytes": 101 * GIB})


def test_table_has_a_line_for_each_part():
    lines = plan_memory(**SIZES).table().splitlines()
    names = [line.split("  ")[0].strip() for line in lines]
    assert names == [
        *("weights", "arenas", "state", "temporaries", "KV blocks"),
        *("unused", "threshold", "budget", "free"),
    ]
    assert "60.0%" in lines[4] and "49152 blocks of 512.00 KiB" in lines[4]
    assert "100.0%  release_threshold=0.8 of the budget" in lines[6]
    assert not any("%" in line for line in lines[7:]), "these are more than all that is shared out"
