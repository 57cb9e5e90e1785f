"""Every op has all that an op must have, and is found by its name."""

from unittest.mock import patch

import pytest

from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.ops.lower import RULES, lower
from tinyvllm.ops.op import OpDef
from tinyvllm.ops.registry import all_ops, op_def

OPS = sorted(all_ops().values(), key=lambda op: op.name)


def fused():
    """The kinds of ops that stand for several after some rule of some phase."""
    step = step_program(PRESETS["llama-3.2-1b"], "step", block_size=16)
    first_rules = [rules[:n] for rules in RULES.values() for n in range(1, len(rules) + 1)]
    kinds = set()
    for rules in first_rules:
        with patch.dict(RULES, first=rules):
            kinds |= {op.kind for op in lower(step, "first").ops if op.parts}
    return kinds


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_has_launches_a_cost_and_a_reference(op):
    def has(method):
        return getattr(type(op), method) is not getattr(OpDef, method)

    assert type(op).__doc__ and op.writes
    assert has("launches") and has("cost")
    assert has("reference") or op.name in fused(), "only a fused op has its parts for a reference"


def test_an_unknown_op_is_named():
    with pytest.raises(KeyError, match="no module of tinyvllm/ops declares an op named softcap"):
        op_def("softcap")
