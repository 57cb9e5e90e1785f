"""Rebuild a byte-level BPE tokenizer from a GGUF file's metadata, pre-tokenizer included."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from tinyvllm.model.gguf_file import GgufFile
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.util import InputError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# Further ends of a turn or a message that Llama 3.x and ChatML models produce.
_END_TEXTS = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """InputError for other tokenizer models than byte-level BPE and unknown pre-tokenizers."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise InputError(
            f"{file.path}: tokenizer.ggml.model={kind!r}: only 'gpt2' (byte-level BPE) can be "
            "rebuilt; use the model's directory in Hugging Face layout"
        )
    pre = file.get("tokenizer.ggml.pre", str, "default")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise InputError(f"{file.path}: tokenizer.ggml.tokens: a token stands there twice")

    model = models.BPE(vocab=vocab, merges=_merges(file, vocab), ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(file, pre)
    backend.decoder = decoders.ByteLevel()
    special, user_defined = [], []
    for token, type_id in zip(tokens, _token_types(file, len(tokens)), strict=True):
        if type_id in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif type_id == _USER_DEFINED:
            user_defined.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)

    bos, eos = (file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos"))
    for name, i in (("bos", bos), ("eos", eos)):
        if i is not None and not 0 <= i < len(tokens):
            raise InputError(
                f"{file.path}: tokenizer.ggml.{name}_token_id={i}: must be below {len(tokens)}"
            )
    if file.get("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return Tokenizer(backend, bos, eos)


def end_token_ids(file: GgufFile) -> list[int]:
    """Every id that ends a text: those the metadata name, and control tokens known to do so."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = {file.get(key, int) for key in keys} - {None}
    if "tokenizer.ggml.tokens" in file.metadata:
        tokens = _strings(file, "tokenizer.ggml.tokens")
        types = _token_types(file, len(tokens))
        ids |= {
            i for i, type_id in enumerate(types) if type_id == _CONTROL and tokens[i] in _END_TEXTS
        }
    return sorted(ids)


def _pre_tokenizer(file: GgufFile, pre: str) -> pre_tokenizers.PreTokenizer:
    """The split into pieces within which merges happen, by llama.cpp's name for it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return gpt2
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre == "llama-bpe":
        return pre_tokenizers.Sequence([_split(_LLAMA3), byte_level])
    if pre == "default":
        # llama.cpp's fallback: punctuation, words, digit runs, then groups of three digits.
        patterns = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
        return pre_tokenizers.Sequence([*map(_split, patterns), byte_level])
    raise InputError(
        f"{file.path}: tokenizer.ggml.pre={pre!r}: must be one of smollm, llama-bpe, gpt-2, default"
    )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise InputError(
                f"{file.path}: tokenizer.ggml.merges: {text[:80]!r} does not join two tokens "
                "into a third"
            )
        merges.append((left, right))
    return merges


def _strings(file: GgufFile, key: str) -> list[str]:
    values: list[str] | None = file.get(key, list)
    if not values or type(values[0]) is not str:  # arrays hold one type
        raise InputError(f"{file.path}: {key} must be an array of strings, and not empty")
    return values


def _token_types(file: GgufFile, count: int) -> list[int]:
    types: list[int] = file.get("tokenizer.ggml.token_type", list, [_NORMAL] * count)
    if len(types) != count or not all(_NORMAL <= t <= _BYTE for t in types):
        raise InputError(
            f"{file.path}: tokenizer.ggml.token_type must be {count} integers from 1 to {_BYTE}"
        )
    return types
