"""docs/extending.md does what it says: its files, changes and commands, in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(
    r"(?:^(?P<mark>`[\w./]+`|<!-- run -->)\n\s*)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)


def blocks(text):
    """(file or None for commands, kind of block, body); a block of no file belongs to the last."""
    name = None
    for match in BLOCK.finditer(text):
        if match["mark"]:
            name = None if match["mark"].startswith("<") else match["mark"].strip("`")
        yield name, match["kind"], match["body"]


def patched(text, diff):
    """The text with a block's lines, which it must hold once, as the block wants them."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"these lines are not there once:\n{before}"
    return text.replace(before, after)


@pytest.fixture
def tree(tmp_path):
    """A copy of the code, and of the tests that the page runs or that share its helpers."""
    wanted = [
        "tinyvllm",
        "cuda_src",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/test_cuda_sources.py",
    ]
    wanted += ["tests/ops/harness.py", "tests/memory/fake_driver.py", "tests/model/conftest.py"]
    for name in wanted:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, target)
    return tmp_path


def test_what_the_page_says_works(tree):
    bin_dir = tree / "bin"  # `tinyvllm` and `python` as they are here, the package from the copy
    bin_dir.mkdir()
    (bin_dir / "tinyvllm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tinyvllm "$@"\n')
    (bin_dir / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for script in bin_dir.iterdir():
        script.chmod(0o755)
    path = f"{bin_dir}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    ran = []
    for name, kind, body in blocks(PAGE.read_text()):
        if kind == "bash":
            assert name is None
            run = subprocess.run(
                ["bash", "-euc", body], cwd=tree, env=env, capture_output=True, text=True
            )
            assert run.returncode == 0, run.stdout + run.stderr
            ran.append(run.stdout)
        elif kind == "diff":
            file = tree / name
            file.write_text(patched(file.read_text(), body))
        else:
            file = tree / name
            assert not file.exists(), f"{name} is there already"
            file.parent.mkdir(exist_ok=True)
            file.write_text(body)
    assert len(ran) == 3
    assert "softcap_kernel<float, 4>" in ran[1], "the kernel of the new model's step is shown"


def test_changes_that_fit_nowhere_are_told():
    assert patched("a\nb\nc\n", " a\n-b\n+B\n") == "a\nB\nc\n"
    for text in ("a\nx\n", "a\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="not there once"):
            patched(text, " a\n-b\n")
