import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.util import InputError


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scheduling_policy", "lifo", "must be one of fcfs, priority, shortest"),
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


def test_the_limit_itself_is_allowed():
    assert EngineConfig(preemption_threshold=1).preemption_threshold == 1
