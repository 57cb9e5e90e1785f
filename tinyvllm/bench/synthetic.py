"""Steps of made-up sequences, set up directly in the state of a CUDA executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinyvllm.bench.timing import WARMUP_REPLAYS, captured, replay_seconds
from tinyvllm.config import check_int
from tinyvllm.engine.batch import MIN_CONTEXT_CLASS, Batch, row_bucket, size_class
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.random_fill import fill_launches
from tinyvllm.ops.row_params import as_words, new_row_params
from tinyvllm.util import InputError, ceil_div

UNIT_SCALE = 3**0.5 / 32768  # of random 16-bit integers: values of variance 1
GRAPH_REPLAYS = 33  # of `graph_seconds`: about as many steps as are measured end to end
FILL_ELEMENTS = 1 << 30  # in one launch


def fill_random(
    executor: CudaExecutor, array: DeviceArray, *, key: int = 0, scale: float = 1.0
) -> None:
    """Gives an array of activations random values of mean 0 and deviation `scale`."""
    for number, first in enumerate(range(0, array.size, FILL_ELEMENTS)):
        executor.launch(
            fill_launches(
                array.ptr + first * array.dtype.itemsize,
                array.dtype,
                key=key + number,
                base=0.0,
                scale=scale * UNIT_SCALE,
                num_rows=1,
                row_len=min(FILL_ELEMENTS, array.size - first),
            )
        )


def check_steps(batches: Sequence[int], contexts: Sequence[int]) -> None:
    """InputError for steps without rows or tokens, or with more than are ever set up."""
    for batch in batches:
        check_int("batch", batch, 1, 4096)
    for context in contexts:
        check_int("context", context, 1, 1 << 20)


def decode_dims(rows: int, longest: int) -> dict[str, int]:
    """Sizes of a decode step of so many rows, padding included, of up to `longest` tokens."""
    dims = {"T": rows, "R": rows, "R1": rows + 1, "S": rows, "D": rows, "Q": 0}
    return dims | {"C": size_class(longest, MIN_CONTEXT_CLASS)}


def prefill_dims(rows: int, length: int) -> dict[str, int]:
    """Sizes of a step of whole prompts of `length` tokens."""
    dims = {"T": rows * length, "R": rows, "R1": rows + 1, "S": rows, "D": 0, "CP": 0}
    return dims | {"Q": size_class(length), "C": size_class(length, MIN_CONTEXT_CLASS)}


class SyntheticSteps:
    """Decode steps and prompts for the programs of an executor, all rows of one length.

    The KV cache is filled with random values once; every block of a row's table is another one.
    `seed` decides prompts and the order of blocks.
    """

    def __init__(self, executor: CudaExecutor, limits: Mapping[str, int], vocab: int) -> None:
        self._executor, self._limits, self._vocab = executor, limits, vocab
        self._rng = np.random.default_rng(0)
        self._kv = executor.array("kv_cache")
        self._filled = 0  # blocks

    def set_rows(self, rows: int, position: int, last: int, *, temperature: float = 0.0) -> None:
        """Puts slots 0 .. rows-1 at `position`, with tables for positions up to `last`.

        With a temperature, rows sample with top_k 50, top_p 0.9 and min_p 0.01, where the program
        filters. InputError if the KV cache is too small.
        """
        slots, table_len = self._limits["SLOTS"], self._limits["MB"]
        blocks = ceil_div(last + 1, self._kv.shape[-2])
        if rows * blocks > self._kv.shape[0] or blocks > table_len:
            raise InputError(
                f"{rows} rows of {last + 1} tokens need {rows * blocks} KV blocks: there are "
                f"{self._kv.shape[0]}, {table_len} for a row"
            )
        self._fill_kv(rows * blocks)
        tables = np.zeros((1, slots, table_len), np.int32)
        ids = self._rng.permutation(rows * blocks).astype(np.int32)
        tables[0, :rows, :blocks] = ids.reshape(rows, blocks)
        params = new_row_params(slots)
        params["temperature"] = temperature
        params["seed"][:, 0] = np.arange(slots)
        if temperature > 0:
            params["top_k"], params["top_p"], params["min_p"] = 50, 0.9, 0.01
        tokens = self._rng.integers(0, self._vocab, slots).astype(np.int32)
        self._executor.write_state("block_tables", tables)
        self._executor.write_state("row_params", as_words(params))
        self._executor.write_state("row_token", tokens)
        self.set_position(position)

    def set_position(self, position: int) -> None:
        """Moves all slots to this position."""
        positions = np.full(self._limits["SLOTS"], position, np.int32)
        self._executor.write_state("row_position", positions)

    def decode(self, rows: int, longest: int, padded_to: int | None = None) -> Batch:
        """A decode step of `rows` rows of up to `longest` tokens, and of padding up to a number."""
        count = padded_to or rows
        slots = np.where(np.arange(count) < rows, np.arange(count), -1)
        return Batch(
            decode_dims(count, longest),
            self._inputs(slots, np.arange(count + 1), np.full(count, -1)),
        )

    def prefill(self, rows: int, length: int) -> Batch:
        """A step of whole prompts of `length` tokens; the rows must be at position 0."""
        starts = np.arange(rows + 1) * length
        ids = self._rng.integers(0, self._vocab, rows * length)
        return Batch(prefill_dims(rows, length), self._inputs(np.arange(rows), starts, ids))

    def graph_seconds(self, program: str, rows: int, context: int, settle: int = 0) -> float:
        """Time of a decode step as a graph replayed on its own, padded as the engine pads it.

        `set_rows` is done here; the middle one of the replays measured has the context named.
        `settle` replays more come before those.
        """
        warmup = WARMUP_REPLAYS + settle
        first = max(0, context - 1 - warmup - GRAPH_REPLAYS // 2)
        last = first + warmup + GRAPH_REPLAYS - 1
        self.set_rows(rows, first, last + 1)
        step = self.decode(rows, last + 1, row_bucket(rows, self._limits["R"]))
        self._executor.run(program, step.dims, step.inputs, ()).discard()
        self.set_position(first)
        by_op = self._executor.launches_by_op(program, step.dims)
        launches = [launch for _, launches in by_op for launch in launches]
        with captured(launches, self._executor.stream) as graph:
            return replay_seconds(graph, self._executor.stream, GRAPH_REPLAYS, warmup)

    def _inputs(
        self, slots: np.ndarray, starts: np.ndarray, ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        arrays = {
            "edit_counts": np.zeros(2),
            "batch_slots": slots,
            "query_start": starts,
            "sample_rows": np.arange(len(slots)),
            "prompt_ids": ids,
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def _fill_kv(self, blocks: int) -> None:
        new = blocks - self._filled
        if new > 0:
            block_size = self._kv.size // self._kv.shape[0]
            ptr = self._kv.ptr + self._filled * block_size * self._kv.dtype.itemsize
            array = DeviceArray(ptr, (new * block_size,), self._kv.dtype)
            fill_random(self._executor, array, key=self._filled)
            self._filled = blocks
