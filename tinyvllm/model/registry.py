"""Which architectures there are, and what emits the forward pass of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tinyvllm.model import llama
from tinyvllm.ops.program import Program

if TYPE_CHECKING:
    from tinyvllm.model.config import ModelConfig


class Architecture(NamedTuple):
    """Three functions that emit a model into a program; each returns the buffer that it writes.

    Before them the program has declared what the step gives to the layers: `token_ids`,
    `positions`, `token_slots` [T], `query_start` [R + 1], `batch_slots`, `seq_lens` [R],
    `block_tables` and `kv_cache`. Activations are [T, hidden_size].
    """

    embed: Callable[[Program, ModelConfig, str], str]  # (p, config, out)
    # (p, config, layer, x, out, kind of the buffer `out`)
    decoder_layer: Callable[[Program, ModelConfig, int, str, str, str], str]
    # (p, config, x, out, kind): final norm and product, float32 logits of x's rows
    head: Callable[[Program, ModelConfig, str, str, str], str]


LLAMA = Architecture(llama.embed, llama.decoder_layer, llama.head)

# By the name that `architectures` in config.json gives.
ARCHITECTURES = {"LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA}
