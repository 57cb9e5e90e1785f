"""Each file says what it is for: the first thing that a reader sees."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [*ROOT.glob("tinyvllm/**/*.py"), *ROOT.glob("examples/*.py"), ROOT / "build.py"]
SOURCES = [*ROOT.glob("cuda_src/**/*.cu"), *ROOT.glob("cuda_src/**/*.cuh")]


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sorted(MODULES), ids=name)
def test_a_module_says_its_responsibility_in_one_sentence(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    assert re.fullmatch(r"\S.{20,}\.", first), f"no sentence: {first!r}"
    assert not re.search(r"[.!?] [A-Z]", first), f"more than one sentence: {first!r}"


@pytest.mark.parametrize("path", sorted(SOURCES), ids=name)
def test_a_kernel_source_begins_with_what_it_computes(path):
    assert re.match(r"// \S", path.read_text())
