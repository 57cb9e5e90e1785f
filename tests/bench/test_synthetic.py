"""Made-up steps on a GPU, and by them: kernels that start early compute what they would in turn."""

from contextlib import closing

import numpy as np
import pytest

from tinyvllm.bench.synthetic import SyntheticSteps
from tinyvllm.config import EngineConfig
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.memory import copy_to_host
from tinyvllm.engine import cuda_backend
from tinyvllm.engine.backend import open_backend
from tinyvllm.model.hub import resolve_model
from tinyvllm.util import InputError

ROWS, LONGEST, SAMPLE = 32, 2048, 256
CONFIG = EngineConfig(
    model="llama-3.2-1b",
    load_format="dummy",
    device="cuda",
    max_model_len=LONGEST,
    max_num_seqs=ROWS,
    num_gpu_blocks_override=ROWS * LONGEST // 16,
)


class InTurn(KernelLoader):
    """Each launch starts only when the one before it has ended."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pdl = False


def open_steps():
    model = resolve_model(CONFIG.model, CONFIG.load_format, CONFIG.revision)
    backend = open_backend(CONFIG, model)
    return backend, SyntheticSteps(backend.executor, backend.limits, model.config.vocab_size)


def after_random_steps(count):
    """The tokens of all rows and a sample of the KV blocks, as bits, after decode steps of random
    rows and padding, of which the host waits for none."""
    backend, steps = open_steps()
    with closing(backend):
        executor, rng = backend.executor, np.random.default_rng(0)
        # Contexts that no two blocks share, then contexts that are split.
        for first_positions, longest in ((12, 512), (1500, LONGEST)):
            steps.set_rows(ROWS, 0, LONGEST - 1)
            positions = rng.integers(0, first_positions, ROWS).astype(np.int32)
            executor.write_state("row_position", positions)
            for _ in range(count // 2):
                bucket = int(rng.choice([1, 2, 4, 8, 16, 32]))
                real = int(rng.integers(bucket // 2 + 1, bucket + 1))
                slots = np.full(bucket, -1, np.int32)
                slots[:real] = rng.permutation(ROWS)[:real]
                step = steps.decode(bucket, longest)
                inputs = step.inputs | {"batch_slots": slots}
                graph = bool(rng.integers(2))
                executor.run("decode.plain", step.dims, inputs, (), graph=graph).discard()
        kv = executor.array("kv_cache")
        bits = np.empty((SAMPLE, kv.size // kv.shape[0]), np.uint16)
        copy_to_host(bits, kv.ptr, executor.stream)
        executor.stream.synchronize()
        return executor.read_state("row_token"), bits


@pytest.mark.gpu
def test_early_starts_change_nothing_in_a_thousand_random_steps(device, monkeypatch):
    early = after_random_steps(1000)
    monkeypatch.setattr(cuda_backend, "KernelLoader", InTurn)
    in_turn = after_random_steps(1000)
    for have, want in zip(early, in_turn, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.gpu
def test_rows_that_do_not_fit_are_refused(device):
    backend, steps = open_steps()
    with closing(backend), pytest.raises(InputError, match=f"{ROWS} rows of {LONGEST + 1} tokens"):
        steps.set_rows(ROWS, 0, LONGEST)
