"""Options of vLLM that this engine does not have: known, so that they are refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

# Name -> why not, and the values that ask for nothing and are let through.
UNSUPPORTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "quantization": ("weights are computed in bf16 or fp16", ("none", "None")),
    "tensor_parallel_size": ("a model runs on one GPU", ("1",)),
    "pipeline_parallel_size": ("a model runs on one GPU", ("1",)),
    "data_parallel_size": ("one engine runs; start several servers", ("1",)),
    "trust_remote_code": ("code of a model's makers is never run", ()),
    "enable_lora": ("adapters are not supported", ()),
    "lora_modules": ("adapters are not supported", ()),
    "kv_cache_dtype": ("K and V are kept in the model's type", ("auto",)),
    "speculative_config": ("tokens are generated one by one", ()),
    "tokenizer": ("the model's own tokenizer is used", ()),
    "tokenizer_mode": ("the model's own tokenizer is used", ("auto",)),
    "chat_template": ("the model's own template is used", ()),
    "cpu_offload_gb": ("weights stay on the device", ("0",)),
    "enable_auto_tool_choice": ("tools are not supported", ()),
    "tool_call_parser": ("tools are not supported", ()),
    "reasoning_parser": ("reasoning is not told from text", ()),
    "limit_mm_per_prompt": ("prompts are text", ()),
    "hf_overrides": ("the model's own configuration is used", ()),
    "allowed_origins": ("other sites' pages may not call the server", ()),
    "ssl_keyfile": ("the server speaks HTTP; put a proxy before it", ()),
    "ssl_certfile": ("the server speaks HTTP; put a proxy before it", ()),
}


class Refused(argparse.Action):
    """Ends the program for an option of UNSUPPORTED, unless its value asks for nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """What argparse calls for the option."""
        reason, harmless = UNSUPPORTED[self.dest]
        if values not in harmless:
            shown = option_string if values is None else f"{option_string} {values}"
            parser.error(f"{shown} is not supported: {reason}")
