"""What steps of any mix of prompts and decode rows must take at the least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tinyvllm.bench.floors import Rates
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.programs import step_program
from tinyvllm.ops.executor import described
from tinyvllm.ops.launches import alike
from tinyvllm.ops.lower import lower
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


@dataclass(frozen=True)
class StepWork:
    """What a step computes, in numbers.

    decode_context: positions that all decode rows read. chunks: of each prompt's chunk the first
    token and the number of them.
    """

    num_tokens: int
    num_decodes: int
    num_samples: int
    decode_context: int
    chunks: tuple[tuple[int, int], ...]

    @staticmethod
    def of(step: ScheduledStep) -> StepWork:
        """Takes the numbers of a step that was scheduled."""
        return StepWork(
            step.num_tokens,
            step.num_decodes,
            len(step.sampling_rows),
            sum([row.start for row in step.rows[: step.num_decodes]]) + step.num_decodes,
            tuple((row.start, row.num_tokens) for row in step.prefill_rows),
        )


class StepFloors:
    """Floors of steps: each op moves its bytes and does its operations, whichever takes longer."""

    def __init__(self, model: ModelConfig, block_size: int, rates: Rates) -> None:
        self._model, self._rates = model, rates
        self._program = lower(step_program(model, "floor", block_size=block_size), "prefill")
        # One op of each kind, and how many there are; attention depends on contexts.
        self._ops = [
            (self._program.ops[group[0]], len(group))
            for group in alike(self._program)
            if self._program.ops[group[0]].kind != "attention"
        ]
        self._others = lru_cache(None)(self._others_seconds)

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        context = sum(start + count for start, count in work.chunks)
        products = sum(count * (start + (count + 1) / 2) for start, count in work.chunks)
        num_prompt_tokens = work.num_tokens - work.num_decodes
        return (
            self._others(work.num_tokens, work.num_samples)
            + self._attention(work.num_decodes, work.decode_context, work.decode_context)
            + self._attention(num_prompt_tokens, context, products)
        )

    def total(self, steps: Iterable[StepWork]) -> float:
        """Seconds of all of them together."""
        return sum(map(self.seconds, steps))

    def _attention(self, num_tokens: int, context: float, products: float) -> float:
        """Seconds in all layers. K and V of `context` positions are read, `products` pairs of a
        token and a position that it sees are computed."""
        model, item = self._model, DType.BF16.itemsize
        width = model.num_attention_heads * model.head_dim
        kv_width = model.num_key_value_heads * model.head_dim
        num_bytes = (context * 2 * kv_width + num_tokens * 2 * width) * item
        layers = model.num_hidden_layers
        return layers * self._rates.floor(int(num_bytes), int(4 * products * width))

    def _others_seconds(self, num_tokens: int, num_samples: int) -> float:
        dims = {"T": num_tokens, "R": num_samples, "R1": num_samples + 1, "S": num_samples}
        dims |= {"SLOTS": num_samples, "D": 0, "Q": num_tokens, "C": num_tokens, "CP": 0}
        dims |= {"E": 1, "B": 1, "NB": 1, "MB": 1}
        total = 0.0
        for op, count in self._ops:
            cost = op_def(op.kind).cost(described(self._program, op, dims, DType.BF16))
            total += count * self._rates.floor(cost.bytes, cost.flops)
        return total
