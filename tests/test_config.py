import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.util import InputError


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "scheduling_policy",
            "lifo",
            "must be one of fcfs, priority, shortest, or module:function",
        ),
        ("scheduling_policy", ".module:function", "must be one of"),
        ("scheduling_policy", 1, "must be text"),
        ("preemption_threshold", "0.5", "must be a number"),
        ("preemption_threshold", True, "must be a number"),
        ("preemption_threshold", 0.05, "must be above 0.05 and at most 1"),
        ("preemption_threshold", 1.01, "must be above 0.05 and at most 1"),
        ("preemption_threshold", float("nan"), "must be above 0.05 and at most 1"),
        ("enable_prefix_caching", 1, "must be True or False"),
    ],
)
def test_options_of_the_scheduler_out_of_range(name, value, message):
    with pytest.raises(InputError, match=rf"{name}={value!r}: {message}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "4"])
def test_a_swap_space_that_cannot_be(value):
    with pytest.raises(InputError, match=f"swap_space={value!r}"):
        EngineConfig(swap_space=value)


def test_swapping_needs_swap_space():
    with pytest.raises(InputError, match="preemption_mode='swap' needs swap_space"):
        EngineConfig(preemption_mode="swap", swap_space=0)
    EngineConfig(preemption_mode="auto", swap_space=0)


@pytest.mark.parametrize(
    ("seqs", "limit"), [(0, "max_num_seqs=0: must be from 1"), (5, "=4.* at least max_num_seqs=5")]
)
def test_a_budget_below_one_token_a_sequence_is_refused(seqs, limit):
    with pytest.raises(InputError, match=limit):
        EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=4)


def test_the_limit_itself_is_allowed():
    assert EngineConfig(preemption_threshold=1).preemption_threshold == 1


def test_the_gpu_that_is_asked_for():
    numbers = {"auto": 0, "cuda": 0, "cuda:3": 3, "cpu": None}
    assert {name: EngineConfig(device=name).gpu_index for name in numbers} == numbers


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cuda:1 ", "cuda:²", "cuda:٣"])
def test_a_device_that_cannot_be(device):
    with pytest.raises(InputError, match=f"device={device!r}: must be auto, cpu, cuda or cuda:N"):
        EngineConfig(device=device)
    with pytest.raises(InputError, match="must be auto, cpu, cuda or cuda:N"):
        EngineConfig(device="cuda:" + "9" * 5000)
