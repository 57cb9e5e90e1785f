"""Finds an op's declaration by name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from tinyvllm.ops.op import OpDef


@cache
def all_ops() -> dict[str, OpDef]:
    """Every op, by name: the OpDef subclasses of the modules of this package."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"tinyvllm.ops.{module.name}")
    ops: dict[str, OpDef] = {}
    stack = OpDef.__subclasses__()
    while stack:
        cls = stack.pop()
        stack.extend(cls.__subclasses__())
        named = "name" in vars(cls)  # others are what several ops share
        if named and cls.__module__.startswith("tinyvllm.ops."):
            assert cls.name not in ops, f"two ops are named {cls.name}"
            ops[cls.name] = cls()
    return ops


def op_def(name: str) -> OpDef:
    """The declaration of the op with this name; KeyError for an unknown one."""
    ops = all_ops()
    if name not in ops:
        raise KeyError(f"no module of tinyvllm/ops declares an op named {name}")
    return ops[name]
