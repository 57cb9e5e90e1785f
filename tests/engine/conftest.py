"""Engines of a tiny golden model, on the CPU and, marked `gpu`, on a GPU."""

from contextlib import ExitStack, closing

import pytest
from comparison import Comparison

from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_name(request):
    return request.param


@pytest.fixture
def open_engine(golden, device_name, request):
    """Opens engines by their options, over the module's `SIZES`, and closes them."""
    with ExitStack() as stack:

        def open_one(**options):
            model = str(golden / "llama_bias")
            options = {**request.module.SIZES, "device": device_name, **options}
            return stack.enter_context(closing(LLMEngine(EngineConfig(model=model, **options))))

        yield open_one


@pytest.fixture(scope="module")
def reference(golden, device_name, request):
    """An engine, for the whole module, whose results do not depend on what it did before."""
    config = EngineConfig(
        model=str(golden / "llama_bias"),
        device=device_name,
        enable_prefix_caching=False,
        **request.module.SIZES,
    )
    with closing(LLMEngine(config)) as engine:
        yield engine


@pytest.fixture
def comparison(reference):
    return Comparison(reference)
