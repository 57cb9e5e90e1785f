"""The commands and the Python of the documents: the command line takes them, they run."""

import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from tinyvllm import cli
from tinyvllm.cli.main import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.M | re.S)


def commands():
    """(document, words) of each command of ours in a block of shell."""
    for path in DOCUMENTS:
        lines = "".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
        for words in (shlex.split(line.split(" && ")[-1], comments=True) for line in lines):
            if "tinyvllm" in words:
                yield path, words[words.index("tinyvllm") + 1 :]
            elif words[:1] == ["python"] and words[1] != "-m":
                yield path, words


@pytest.fixture
def taken(monkeypatch):
    """The commands' functions replaced, so that a command line is parsed and nothing runs."""
    names = []
    for info in pkgutil.iter_modules(cli.__path__):
        module = importlib.import_module(f"tinyvllm.cli.{info.name}")
        for name in filter(re.compile("run_").match, dir(module)):
            monkeypatch.setattr(module, name, lambda *args, name=name: names.append(name) or 0)
    return names


@pytest.mark.parametrize(
    ("path", "words"), [pytest.param(*c, id=f"{c[0].stem}: {' '.join(c[1])}") for c in commands()]
)
def test_a_command_is_one(taken, path, words):
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        return
    assert main(words) == 0 and len(taken) == 1
    if "--" in words:  # trace: what follows is a command too
        assert main(words[words.index("--") + 1 :]) == 0 and len(taken) == 2


def test_commands_are_found():
    found = {words[0] for _, words in commands()}
    assert found >= {"generate", "chat", "serve", "plan", "trace", "kernel", "bench", "python"}


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "serving.md"], ids=str)
def test_python_of_the_documents_runs(path, golden, capsys):
    (code,) = blocks(path, "python")
    assert "path/to/model" in code
    exec(code.replace("path/to/model", str(golden / "llama_bias")), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([\w-]+))?\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            assert anchor in {head.lower().replace(" ", "-") for head in heads}, anchor
