"""The documents keep step with the code: call names, files, what is in them, figures, pictures."""

import importlib.util
import re
from pathlib import Path

import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.driver.calls import PHASES
from tinyvllm.driver.kernel import DEFAULT_SMEM
from tinyvllm.driver.recorder import Call
from tinyvllm.memory.upload import SLOT_BYTES
from tinyvllm.model.presets import PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CALLS, TOKEN = DOCS / "cuda-calls.md", DOCS / "how-a-token-is-made.md"
FUNCTION = re.compile(r"\b(cu[A-Z]\w+|nvrtc[A-Z]\w+)\b")

spec = importlib.util.spec_from_file_location("refresh", DOCS / "refresh.py")
refresh = importlib.util.module_from_spec(spec)
spec.loader.exec_module(refresh)


def functions_called():
    """Names of all CUDA and NVRTC functions in the package's sources."""
    names = set()
    for path in (ROOT / "tinyvllm" / "driver").rglob("*.py"):
        for literal in re.findall(
            r'(?:call|succeeds|_functions)[\[(]\s*f?"([^"]+)"', path.read_text()
        ):
            if literal == "nvrtcGet{what}":
                names |= {f"nvrtcGet{w}" for w in ("CUBIN", "PTX", "ProgramLog")}
            elif literal == "nvrtcGet{what}Size":
                names |= {f"nvrtcGet{w}Size" for w in ("CUBIN", "PTX", "ProgramLog")}
            else:
                names.add(literal)
    return names


def prose(text):
    """The document without its listings."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def test_the_sources_are_understood():
    names = functions_called()
    assert {"cuInit", "cuLaunchKernelEx", "cuEventQuery", "nvrtcGetPTXSize"} <= names
    assert all(FUNCTION.fullmatch(name) for name in names)


def test_every_call_of_the_code_is_explained_and_no_other():
    mentioned = set(FUNCTION.findall(prose(CALLS.read_text())))
    assert mentioned == functions_called()


def test_listings_hold_no_call_that_the_code_does_not_make():
    listed = set(FUNCTION.findall("".join(re.findall(r"```.*?```", CALLS.read_text(), re.DOTALL))))
    assert {n for n in listed if not n.startswith("cuda")} <= functions_called()


def test_every_phase_has_its_paragraph_and_listing():
    text = CALLS.read_text()
    blocks = re.findall(r"<!-- listing: ([\w-]+) -->", text)
    assert set(blocks) == set(PHASES) - {"swap"}
    for phase in blocks:
        assert f"## {phase.capitalize()}\n" in text
    assert text.count("<!-- end -->") == len(blocks) + 1


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_files_exist_and_hold_what_is_named_behind_them(path):
    # A path alone on its line is that of the block below: a file that the page makes.
    text = re.sub(r"^`[\w./]+`$", "", path.read_text(), flags=re.MULTILINE)
    for file, names in re.findall(
        r"`((?:tinyvllm|cuda_src|examples)/[\w/.]+)`(?:,? \(?`([\w., `]+)`\)?)?", text
    ):
        assert (ROOT / file).exists(), file
        for name in re.findall(r"[\w.]+", names):
            if "/" in name or not (ROOT / file).is_file():
                continue
            source = (ROOT / file).read_text()
            for part in name.split("."):
                assert re.search(rf"(def|class) {part}\b", source), f"{file} has no {part}"
    for target in re.findall(r"\]\(([\w.-]+)\)", text):
        assert (path.parent / target).exists(), target


def test_ten_steps_name_their_files():
    steps = re.findall(r"^\*\*(\d+)\. .*", TOKEN.read_text(), re.MULTILINE)
    assert steps == [str(n) for n in range(1, 11)]
    for line in TOKEN.read_text().splitlines():
        if line.startswith("**"):
            assert re.search(r"`(tinyvllm|cuda_src)/", line), line[:40]


def test_figures():
    text, config, model = TOKEN.read_text(), EngineConfig(), PRESETS["llama-3.2-1b"]
    assert f"at most {config.max_num_batched_tokens} tokens by default" in text
    assert f"New blocks of {config.block_size} tokens" in text
    kv_heads = model.num_hidden_layers * 2 * model.num_key_value_heads
    block = kv_heads * config.block_size * model.head_dim * model.dtype.itemsize
    assert f"one piece of {block >> 10} KiB over all layers" in text
    assert f"pinned slots of {SLOT_BYTES >> 20} MiB" in CALLS.read_text()
    assert f"beyond {DEFAULT_SMEM >> 10} KiB" in CALLS.read_text()


def test_figures_in_the_readme():
    text = (ROOT / "README.md").read_text()
    svg = (DOCS / "plan-prefill.svg").read_text()
    arena, without = re.search(r"([\d.]+) MiB of arena for ([\d.]+) GiB of buffers", svg).groups()
    assert (
        f"share {float(arena):.0f} MiB" in text and f"{float(without):.1f} GiB one beside" in text
    )
    for target in re.findall(r"\]\((docs/[\w.-]+)\)", text):
        assert (ROOT / target).exists(), target


def test_figures_of_the_arena():
    text, svg = (DOCS / "memory.md").read_text(), (DOCS / "plan-decode.svg").read_text()
    rows, arena, without = re.search(
        r"(\d+) rows: ([\d.]+ MiB) of arena for ([\d.]+ MiB) of buffers, lower bound \2", svg
    ).groups()
    assert f"a decode step of {rows} rows" in text
    assert f"bound, {arena}, where" in text and f"would take {without}" in text


@pytest.mark.parametrize("name", ["plan-prefill.svg", "plan-decode.svg"])
def test_pictures_are_what_the_program_draws(name):
    assert (DOCS / name).read_text() == refresh.pictures()[name], "run python docs/refresh.py"


def made(name, phase, thread="MainThread", **args):
    return Call(name, args, None, "", 0.001, 2e-6, phase, thread)


def test_listings_are_filled_from_a_trace():
    calls = [made("cuInit", "start-up", Flags=0)]
    calls += [made("cuEventCreate", "start-up", Flags="CU_EVENT_DEFAULT")] * 12
    calls += [made("nvrtcVersion", "compile", f"compile_{i}") for i in range(3)]
    where = "-I/home/someone/lib/nvidia/cu13/include"
    calls += [made("nvrtcCreateProgram", "compile", "compile_0", src="/home/someone/cuda_src/a.cu")]
    calls += [made("nvrtcCompileProgram", "compile", "compile_0", options=[where])]
    calls += [made(f"cuCall{i}", "decode") for i in range(40)]
    text = refresh.filled(CALLS.read_text(), calls)
    assert "| start-up | 13 | 0.0 | `cuEventCreate` (12) |" in text
    assert "cuEventCreate(Flags=CU_EVENT_DEFAULT)   (x 12)" in text
    assert "compile_0" in text and "compile_1" not in text
    assert "someone" not in text and "(src=cuda_src/a.cu)" in text, "no places of one machine"
    assert "... 18 more calls ..." in text and "cuCall39()" in text and "cuCall20" not in text
    assert prose(text).count("<!-- end -->") == CALLS.read_text().count("<!-- end -->")
