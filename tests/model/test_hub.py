"""resolve_model: every kind of name, and the order in which the default model is looked for."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tinyvllm.model import hub, smollm2
from tinyvllm.model.hub import default_model, model_config, resolve_model
from tinyvllm.model.presets import PRESETS
from tinyvllm.util import DType, InputError


def test_directory(golden: Path) -> None:
    model = resolve_model(str(golden / "llama_sharded"))
    assert model.kind == "directory" and model.config.head_dim == 128
    assert model.where == f"llama_sharded from {golden / 'llama_sharded'}"
    source = model.open_source()
    out = np.empty(192, np.uint16)
    source.read("model.norm.weight", DType.BF16, out)
    source.close()
    assert model.tokenizer().encode("A") == [35]


def test_gguf(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    model = resolve_model(str(path))
    assert model.kind == "gguf" and model.where == f"Tiny from {path}"
    assert model.config.hidden_size == 128 and model.tokenizer().encode("hel") == [261]
    for _ in range(2):  # each opening is a source of its own
        source = model.open_source()
        source.read("model.norm.weight", DType.F32, np.empty(128, np.float32))
        source.close()


def test_a_configuration_needs_no_weights(
    golden: Path, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    assert model_config("llama-3.2-1b") == ("preset llama-3.2-1b", PRESETS["llama-3.2-1b"])
    path = write_gguf()
    assert model_config(str(path)) == (f"Tiny from {path}", resolve_model(str(path)).config)
    shutil.copy(golden / "mistral" / "config.json", tmp_path)
    where, config = model_config(str(tmp_path))
    assert where == f"{tmp_path.name} from {tmp_path / 'config.json'}"
    assert config == resolve_model(str(golden / "mistral")).config
    with pytest.raises(InputError, match="model='org/name': no such directory or GGUF file"):
        model_config("org/name")


def test_preset_and_dummy_directory(golden: Path, tmp_path: Path) -> None:
    preset = resolve_model("llama-3.2-1b", "dummy")
    assert preset.kind == "preset" and preset.config == PRESETS["llama-3.2-1b"]
    assert preset.tokenizer().encode("hi") == [104, 105]
    assert preset.open_source().shape("model.norm.weight") == (2048,)
    real = resolve_model(str(golden / "mistral"), "dummy")
    assert real.tokenizer().encode("A") == [35] and "random weights" in real.where
    shutil.copy(golden / "mistral" / "config.json", tmp_path)
    assert resolve_model(str(tmp_path), "dummy").tokenizer().encode("A") == [65]


@pytest.mark.parametrize(
    ("name", "load_format", "message"),
    [
        ("", "auto", "model is empty"),
        ("llama-3.2-1b", "auto", "use load_format='dummy'"),
        ("no-such-model", "auto", "no such directory or file"),
        ("../up/../there", "auto", "no such directory or file"),
        ("org/name", "dummy", "must be a directory with a config.json"),
    ],
)
def test_refused_names(name: str, load_format: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(name, load_format)


def test_wrong_formats(golden: Path, write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"wants a \.gguf file"):
        resolve_model(str(golden / "mistral"), "gguf")
    with pytest.raises(InputError, match="wants a directory"):
        resolve_model(str(write_gguf()), "safetensors")
    with pytest.raises(InputError, match=r"ends in \.gguf"):
        resolve_model(str(golden / "mistral" / "config.json"))


def test_revision_is_for_hub_names_that_can_be_paths(golden: Path) -> None:
    with pytest.raises(InputError, match=r"revision='main': .*mistral does not come from the hub"):
        resolve_model(str(golden / "mistral"), revision="main")
    for revision in ("", "../../elsewhere", "a/../../b", "/etc"):
        with pytest.raises(InputError, match="must be the name of a branch, tag or commit"):
            resolve_model("org/name", revision=revision)


def test_chat_template_and_defaults(
    golden: Path, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    shutil.copytree(golden / "mistral", tmp_path / "model")
    directory = tmp_path / "model"
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    (directory / "generation_config.json").write_text('{"top_p": 0.5}')
    chat = [{"role": "user", "content": "hi"}]
    for load_format in ("auto", "dummy"):
        model = resolve_model(str(directory), load_format)
        assert model.chat_template().render(chat) == "hi</s>"
        assert model.generation_defaults == {"top_p": 0.5}
    template = "{{ bos_token }}{{ messages[0].content }}"
    model = resolve_model(str(write_gguf(change=lambda w: w.add_chat_template(template))))
    assert model.chat_template().render(chat) == "<s>hi" and model.generation_defaults == {}
    preset = resolve_model("llama-3.2-1b", "dummy")
    with pytest.raises(InputError, match="preset with random weights has no chat template"):
        preset.chat_template()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty hub cache, and a hub at a port where nothing listens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub() -> None:
    with pytest.raises(InputError, match=r"'org/name': cannot be had from the hub: .+"):
        resolve_model("org/name")


def test_default_model_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GGUF at hand, hub's cache, hub, package: each is asked only if those before it fail."""
    asked: list[str] = []
    have: set[str] = set()

    def answer(name: str, value: Path, default: Path | None = None) -> Callable[..., Path | None]:
        def ask(*_: object) -> Path | None:
            asked.append(name)
            if name not in have and name == "hub":
                raise InputError("unreachable")
            return value if name in have else default

        return ask

    monkeypatch.setattr(smollm2, "cached_gguf", answer("gguf", tmp_path / "cached"))
    monkeypatch.setattr(hub, "_hub_cache", answer("cache", tmp_path))
    monkeypatch.setattr(hub, "_download", answer("hub", tmp_path))
    monkeypatch.setattr(smollm2, "fetch_gguf", answer("package", tmp_path / "new"))
    steps = [
        ("package", str(tmp_path / "new"), ["gguf", "cache", "hub", "package"]),
        ("hub", smollm2.HUB_NAME, ["gguf", "cache", "hub"]),
        ("cache", smollm2.HUB_NAME, ["gguf", "cache"]),
        ("gguf", str(tmp_path / "cached"), ["gguf"]),
    ]
    for name, result, order in steps:
        have.add(name)
        asked.clear()
        assert (default_model(), asked) == (result, order)


def test_incomplete_snapshots_do_not_count(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(golden / "llama_sharded", snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert hub._hub_cache("org/name") == snapshot
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    assert hub._hub_cache("org/name") is None
