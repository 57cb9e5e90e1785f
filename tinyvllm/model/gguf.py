"""Read a GGUF file of the llama architecture: tensors dequantised, names and order as in HF."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from tinyvllm.model.config import ModelConfig, RopeConfig
from tinyvllm.model.gguf_file import GgufFile, GgufTensor, import_gguf
from tinyvllm.model.gguf_tokenizer import build_tokenizer, end_token_ids
from tinyvllm.model.source import check_span, missing_tensor, store
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.util import DType, InputError, align_up

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_CHUNK = 1 << 16  # elements dequantised at a time: the temporaries stay in the L2 cache
_TASK = 1 << 17  # elements of one thread's task
_MAX_THREADS = 4


class GgufSource:
    """TensorSource, configuration and tokenizer of one GGUF file.

    llama.cpp stores the rows of Q and K of each head with the rotated pairs side by side; they are
    put back into Hugging Face's order (first halves, then second halves).
    """

    def __init__(self, file: GgufFile | Path | str) -> None:
        self._file = file if isinstance(file, GgufFile) else GgufFile.parse(file)
        self._config = model_config(self._file)
        self._dequantize = import_gguf().quants.dequantize
        self._tensors = {
            _hf_name(name): tensor
            for name, tensor in self._file.tensors.items()
            if name != _ROPE_FREQS  # part of the configuration
        }
        self._check_tensors()
        self._fd: int | None = os.open(self._file.path, os.O_RDONLY)
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gguf")

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, dtype: DType, out: np.ndarray, start: int = 0) -> None:
        tensor = self._tensor(name)
        check_span(name, tensor.size, dtype, out, start)
        step = align_up(_TASK, self._unit(name, tensor))

        def fill(begin: int) -> None:
            self._fill(name, tensor, dtype, out[begin : begin + step], start + begin)

        begins = range(0, out.size, step)
        # Consuming the results raises what a task raised.
        for _ in self._pool.map(fill, begins) if len(begins) > 1 else map(fill, begins):
            pass

    def model_config(self) -> ModelConfig:
        return self._config

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describe, pre-tokenizer included."""
        return build_tokenizer(self._file)

    def close(self) -> None:
        self._pool.shutdown()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise missing_tensor(str(self._file.path), name)
        return self._tensors[name]

    def _unit(self, name: str, tensor: GgufTensor) -> int:
        """Elements that can only be dequantised together: a block; for Q and K a whole head."""
        if _is_permuted(name):
            return self._config.head_dim * tensor.size // tensor.shape[0]
        return tensor.block_size

    def _fill(
        self, name: str, tensor: GgufTensor, dtype: DType, out: np.ndarray, start: int
    ) -> None:
        unit = self._unit(name, tensor)
        chunk = align_up(_CHUNK, unit)
        half = self._config.head_dim // 2
        done = 0
        while done < out.size:
            begin = (start + done) // unit * unit
            end = min(begin + chunk, align_up(start + out.size, unit))
            values = self._blocks(name, tensor, begin, end)
            if _is_permuted(name):
                pairs = values.reshape(-1, half, 2, tensor.size // tensor.shape[0])
                values = pairs.swapaxes(1, 2).reshape(-1)
            values = values[start + done - begin :][: out.size - done]
            piece = out[done : done + values.size]
            store(str(self._file.path), name, values, dtype, piece)
            done += values.size

    def _blocks(self, name: str, tensor: GgufTensor, begin: int, end: int) -> np.ndarray:
        """The elements from `begin` to `end`, both at block borders, as float32."""
        raw = np.empty((end - begin) // tensor.block_size * tensor.block_bytes, np.uint8)
        offset = tensor.offset + begin // tensor.block_size * tensor.block_bytes
        assert self._fd is not None, "read after close"
        if os.preadv(self._fd, [raw.data], offset) != raw.size:
            raise InputError(f"{self._file.path}: ends inside tensor {name!r}")
        # One row, since the package works through groups of 16 rows.
        values: np.ndarray = self._dequantize(raw[None], tensor.quantization)
        return values.reshape(-1)

    def _check_tensors(self) -> None:
        for tensor in self._file.tensors.values():
            try:
                block = np.zeros((1, tensor.block_bytes), np.uint8)
                self._dequantize(block, tensor.quantization)
            except NotImplementedError as error:
                raise InputError(
                    f"{self._file.path}: tensor {tensor.name!r} has the type "
                    f"{tensor.quantization.name}, which the gguf package cannot dequantise"
                ) from error
        for name, tensor in self._tensors.items():
            if _is_permuted(name) and tensor.shape[0] % self._config.head_dim:
                raise InputError(
                    f"{self._file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows: must "
                    f"be a multiple of head_dim={self._config.head_dim}"
                )


def _is_permuted(name: str) -> bool:
    return ".q_proj." in name or ".k_proj." in name


def _hf_name(name: str) -> str:
    """The Hugging Face name; an unknown tensor keeps its own, so that the loader can refuse it."""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _TOP_LEVEL:
            return f"{_TOP_LEVEL[stem]}.{kind}"
        match = re.fullmatch(r"blk\.(0|[1-9][0-9]*)\.(\w+)", stem)
        if match and match[2] in _IN_LAYER:
            return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{kind}"
    return name


def model_config(file: GgufFile) -> ModelConfig:
    """The configuration that a GGUF file's metadata describe; InputError if it is not Llama."""
    arch = file.get("general.architecture", str)
    if arch != "llama":
        raise InputError(f"{file.path}: general.architecture={arch!r}: only 'llama' is supported")
    if file.get("llama.expert_count", int, 0):
        raise InputError(f"{file.path}: llama.expert_count: mixtures of experts are not supported")
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": file.get("llama.vocab_size", int, len(tokens) or None),
        "hidden_size": file.get("llama.embedding_length", int),
        "intermediate_size": file.get("llama.feed_forward_length", int),
        "num_hidden_layers": file.get("llama.block_count", int),
        "num_attention_heads": file.get("llama.attention.head_count", int),
        "num_key_value_heads": file.get("llama.attention.head_count_kv", int),
        "head_dim": file.get("llama.attention.key_length", int),
        "rms_norm_eps": file.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": file.get("llama.rope.freq_base", float),
        "rope_scaling": _rope_scaling(file),
        "max_position_embeddings": file.get("llama.context_length", int),
        "sliding_window": file.get("llama.attention.sliding_window", int),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": "bfloat16",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": end_token_ids(file),
    }
    result = ModelConfig.from_dict(config, source=f"{file.path} (metadata in HF's key names)")
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.get(key, int, result.head_dim) != result.head_dim:
            raise InputError(
                f"{file.path}: {key}={file.metadata[key]}: must be head_dim={result.head_dim}"
            )
    if _ROPE_FREQS in file.tensors:
        return replace(result, rope=_llama3_scaling(file, result))
    return result


def _rope_scaling(file: GgufFile) -> dict[str, object] | None:
    kind = file.get("llama.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": file.get("llama.rope.scaling.factor", float)}


def _llama3_scaling(file: GgufFile, config: ModelConfig) -> RopeConfig:
    """The `llama3` scaling behind `rope_freqs.weight`, which holds a divisor per frequency.

    The files do not say which parameters the divisors were made from. All Llama 3.x models share
    all of them but the factor, which is the largest divisor; anything else is refused.
    """
    tensor = file.tensors[_ROPE_FREQS]
    shape = (config.head_dim // 2,)
    if tensor.quantization.name != "F32" or tensor.shape != shape:
        raise InputError(
            f"{file.path}: {_ROPE_FREQS} has type {tensor.quantization.name} and shape "
            f"{list(tensor.shape)}: must be F32 and {list(shape)}"
        )
    divisors = np.fromfile(file.path, "<f4", count=shape[0], offset=tensor.offset)
    factor = float(divisors.max())
    scaled = RopeConfig(config.rope.theta, "llama3", factor, 1.0, 4.0, 8192)
    expected = config.rope.inv_freq(config.head_dim) / scaled.inv_freq(config.head_dim)
    if config.rope.kind != "default" or not np.allclose(divisors, expected, rtol=1e-4):
        raise InputError(
            f"{file.path}: {_ROPE_FREQS} is not the scaling of Llama 3.x (low_freq_factor 1, "
            f"high_freq_factor 4, original context 8192; largest divisor here {factor:g})"
        )
    return scaled
