"""Every kernel of cuda_src/ is declared once, with the parameters that its source has."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import tinyvllm
from tinyvllm.driver.spec import Kernel

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "cuda_src"
OPS = {path.stem for path in (ROOT / "tinyvllm" / "ops").glob("*.py")}
# Kernels that are no op: the module that launches them.
# One checks an installation, one is what a bench compares with.
NO_OPS = {"doctor": "doctor.py", "read_pages": "bench/attention.py"}
SCALARS = {
    "i32": {"int", "i32"},
    "u32": {"u32", "unsigned", "unsigned int"},
    "i64": {"i64", "long long"},
    "u64": {"u64", "unsigned long long"},
    "f32": {"float"},
    "map": {"TensorMap"},
}
PATTERN = re.compile(
    r"(?:template\s*<(?P<template>[^>{;]*)>\s*)?"
    r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?"
    r"(?P<name>\w+)\s*\((?P<params>[^)]*)\)"
)


def strip_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


def kernels_in_source(path):
    """name -> (number of template parameters, [(type, name)]) of a file's kernels."""
    kernels = {}
    for match in PATTERN.finditer(strip_comments(path.read_text())):
        params = []
        for param in match["params"].split(","):
            words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", param)
            kind, name = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", words, re.S).groups()
            params.append((" ".join(kind.split()), name))
        template = match["template"]
        kernels[match["name"]] = (len(template.split(",")) if template else 0, params)
    return kernels


def declared_kernels():
    """Every Kernel that a module of the package declares."""
    kernels = set()
    for module in pkgutil.walk_packages(tinyvllm.__path__, "tinyvllm."):
        if module.name != "tinyvllm.__main__":
            values = vars(importlib.import_module(module.name)).values()
            kernels |= {value for value in values if isinstance(value, Kernel)}
    return sorted(kernels, key=lambda k: (k.file, k.entry))


def launched_by(module):
    """The kernels that a module declares, or a module beside it of the same stem and a suffix."""
    prefix = module.removesuffix(".py").replace("/", ".")
    names = [n for n in sys.modules if n == prefix or n.startswith(f"{prefix}_")]
    return {v for n in names for v in vars(sys.modules[n]).values() if isinstance(v, Kernel)}


FILES = sorted(SOURCES.glob("*.cu"))
KERNELS = declared_kernels()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_kernel_of_a_file_is_declared(path):
    found = kernels_in_source(path)
    assert path.read_text().count("__global__") == len(found), "the pattern misses a kernel"
    assert found, f"{path.name} has no kernel"
    assert set(found) == {k.entry for k in KERNELS if k.file == path.name}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_op_and_its_test_have_the_stem_of_the_file(path):
    """x.cu, and x_variant.cu where an op has several, belong to ops/x.py and tests/ops/test_x.py;
    an op that shares its name with another's beginning is the longer one."""
    if path.stem in NO_OPS:
        folder, _, name = NO_OPS[path.stem].rpartition("/")
        module, test = f"tinyvllm/{NO_OPS[path.stem]}", f"tests/{folder}/test_{name}"
    else:
        stems = [op for op in OPS if f"{path.stem}_".startswith(f"{op}_")]
        assert stems, f"tinyvllm/ops has no module for {path.name}"
        stem = max(stems, key=len)
        module, test = f"tinyvllm/ops/{stem}.py", f"tests/ops/test_{stem}.py"
    declared = (k for k in KERNELS if k.file == path.name)
    assert (ROOT / module).is_file() and all(k in launched_by(module) for k in declared)
    assert (ROOT / test).is_file(), f"{path.name} has no {test}"
    assert "pytest.mark.gpu" in (ROOT / test).read_text(), f"{test} tests no kernel"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.entry)
def test_the_declared_signature_is_that_of_the_source(kernel):
    _, params = kernels_in_source(SOURCES / kernel.file)[kernel.entry]
    assert [name for _, name in params] == [name for _, name in kernel.params]
    for (source, name), (declared, _) in zip(params, kernel.params, strict=True):
        if declared == "ptr":
            assert source.endswith("*"), f"{name} is {source}, declared as an address"
        else:
            assert source in SCALARS[declared], f"{name} is {source}, declared {declared}"


def test_headers_are_all_included_by_something():
    texts = {path: path.read_text() for path in [*FILES, *SOURCES.glob("include/*.cuh")]}
    for header in SOURCES.glob("include/*.cuh"):
        users = [p for p, text in texts.items() if f'#include "{header.name}"' in text]
        assert users, f"nothing includes {header.name}"


# Of the model: never written while kernels run.
CONSTANTS = {"weight", "bias", "norm_weight", "ahead", "inv_freq"}


SHARED = re.compile(r"__device__ __forceinline__ void (\w+)\((?P<params>[^()]*)\) \{")


def source_of(kernel):
    """(parameters, body) of a kernel's definition, as text, with what it shares with others."""
    text = strip_comments((SOURCES / kernel.file).read_text())
    match = next(m for m in PATTERN.finditer(text) if m["name"] == kernel.entry)
    params, body = match["params"], body_after(text, match.end())
    for shared in SHARED.finditer(text):
        call = re.search(rf"\b{shared[1]}(<[^;{{}}]*>)?\(", body)
        inner = body_after(text, shared.end() - 1)
        if call and "wait_for_previous();" in inner:
            # What is handed over by value may hold pointers.
            handed = re.findall(r"\b[A-Z]\w+ (\w+),", shared["params"])
            return params + "".join(f", void *{name}" for name in handed), inner
    return params, body


def body_after(text, start):
    """From the next brace to the one that closes it."""
    start = text.index("{", start)
    depth, end = 1, start + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start:end]


LAMBDA = re.compile(r"const auto (\w+) = \[&\](?:\([^)]*\))? \{(.*?)\};", re.S)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.pdl], ids=lambda k: k.entry)
def test_kernels_that_start_early_keep_the_rules(kernel):
    """Of programmatic dependent launch: every thread waits, before that only constants are read,
    nothing mutable is __restrict__."""
    params, body = source_of(kernel)
    assert body.count("wait_for_previous();") == 1 and body.count("start_next();") == 1
    before = body[: body.index("wait_for_previous();")]
    assert "return;" not in before, "a thread leaves before the wait"
    assert not re.search(r"\bif \(.*\{", LAMBDA.sub("", before)), "the wait might stand in a branch"
    mutable = set(re.findall(r"\*\s*(?:__restrict__\s+)?(\w+)", params)) - CONSTANTS
    for name, inner in LAMBDA.findall(before):
        if mutable & set(re.findall(r"(?<!\.)\b\w+", inner)):
            called = LAMBDA.sub("", before)
            assert f"{name}(" not in called, f"{name} touches {mutable} before the wait"
    restricted = set(re.findall(r"__restrict__\s+(\w+)", params))
    assert restricted <= CONSTANTS


def test_every_kernel_of_a_program_may_start_early():
    """All but those that fill weights, check an installation or measure."""
    assert {k.entry for k in KERNELS if not k.pdl} == {
        "random_fill_kernel",
        "doctor_kernel",
        "read_pages_kernel",
    }
