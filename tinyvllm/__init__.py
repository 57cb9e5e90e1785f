"""tinyvllm: large language models on NVIDIA GPUs from Python, without PyTorch."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "tinyvllm.api.llm",
    "AsyncLLM": "tinyvllm.api.async_llm",
    "EngineConfig": "tinyvllm.config",
    "RequestOutput": "tinyvllm.outputs",
    "SamplingParams": "tinyvllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    # On first use: importing a submodule must not load the engine, nor a test of kernels NumPy's
    # model code.
    if name not in _HOMES:
        raise AttributeError(f"module 'tinyvllm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
