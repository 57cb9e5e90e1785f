"""Which module may import which: layers one way, CUDA in the driver layer alone, few packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tinyvllm"

# Each may import what stands before it, and modules of its own line.
LAYERS = [
    {"util"},
    {"config", "sampling_params", "outputs", "progress"},
    {"driver"},
    {"memory"},
    {"ops"},
    {"model"},
    {"engine"},
    {"api"},
    # "" is tinyvllm itself, for its version.
    {"", "__main__", "bench", "cli", "doctor", "planning", "serve"},
]
# Third-party packages, and the layers that may import them; None: all.
PACKAGES = {
    "numpy": None,
    "cuda": {"driver"},
    "safetensors": {"model"},
    "tokenizers": {"model"},
    "huggingface_hub": {"model"},  # comes with tokenizers
    "gguf": {"model"},  # the extra of that name
    "jinja2": {"model"},  # the extra `chat`
    "tqdm": {"progress"},  # comes with huggingface_hub
    "fastapi": {"serve"},  # the extra `serve`, down to the last
    "starlette": {"serve"},
    "pydantic": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module):
    """`module`: a dotted name that begins with tinyvllm."""
    return [*module.split("."), ""][1]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path):
    """Dotted names that a file imports anywhere; `from a import b` counts as a.b for packages."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            is_root = node.module == "tinyvllm"
            names += [f"tinyvllm.{a.name}" for a in node.names] if is_root else [node.module]
    return names


def rank(layer):
    ranks = [i for i, names in enumerate(LAYERS) if layer in names]
    assert ranks, f"tinyvllm/{layer} has no place in the order of imports"
    return ranks[0]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way(path):
    own = layer_of(module_of(path))
    for name in imports_of(path):
        if name.split(".")[0] == "tinyvllm":
            assert rank(layer_of(name)) <= rank(own), f"{own or 'tinyvllm'} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_the_allowed_packages_are_imported_where_they_belong(path):
    own = layer_of(module_of(path))
    for name in imports_of(path):
        package = name.split(".")[0]
        if package == "tinyvllm" or package in sys.stdlib_module_names:
            continue
        assert package in PACKAGES, f"{name} is no dependency"
        layers = PACKAGES[package]
        assert layers is None or own in layers, f"{name} is imported in {own}"


def test_the_rules_see_what_they_should():
    """The driver does use CUDA and the engine does use the model: the walk finds imports."""
    calls = imports_of(PACKAGE / "driver" / "calls.py")
    assert any(name.startswith("cuda") for name in calls)
    engine = imports_of(PACKAGE / "engine" / "backend.py")
    assert {layer_of(n) for n in engine if n.startswith("tinyvllm")} >= {"model", "ops", "driver"}
    assert rank("engine") > rank("model") > rank("ops") > rank("memory") > rank("driver")


def loaded_after(code):
    """Top-level and CUDA modules that are loaded after running `code` in a new interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import tinyvllm; tinyvllm.__version__",
        "from tinyvllm import SamplingParams, EngineConfig, RequestOutput",
        "from tinyvllm.driver.spec import Kernel",
        "import tinyvllm.model.llama, tinyvllm.memory.plan",
    ],
)
def test_descriptions_load_without_cuda(code):
    loaded = loaded_after(code)
    assert "cuda.bindings" not in loaded and "tokenizers" not in loaded


def test_the_command_line_loads_no_server():
    loaded = loaded_after("import tinyvllm.cli.main, tinyvllm.api.async_llm")
    assert not loaded & {"fastapi", "uvicorn", "pydantic", "prometheus_client", "cuda.bindings"}


def test_a_command_loads_no_other():
    loaded = loaded_after(
        "from tinyvllm.cli.main import main\ntry: main(['top', '--help'])\nexcept SystemExit: pass"
    )
    assert "tinyvllm.cli.top" in loaded
    assert not loaded & {f"tinyvllm.cli.{name}" for name in ("generate", "serve", "bench")}


def test_llm_is_found_and_unknown_names_are_not():
    import tinyvllm

    assert tinyvllm.LLM.__module__ == "tinyvllm.api.llm"
    for name in tinyvllm.__all__:
        assert getattr(tinyvllm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = tinyvllm.LLMM
