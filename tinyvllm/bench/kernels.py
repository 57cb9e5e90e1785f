"""`tinyvllm bench kernels`: each op of a step next to its floor, and the step as one graph."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tinyvllm.bench.floors import Rates, device_rates
from tinyvllm.bench.roofline import roofline_svg
from tinyvllm.bench.synthetic import SyntheticSteps, check_steps
from tinyvllm.bench.timing import WARMUP_REPLAYS, captured, replay_seconds
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.driver.graph import GraphExec
from tinyvllm.driver.kernel import PreparedLaunch
from tinyvllm.engine.backend import open_backend
from tinyvllm.engine.batch import Batch, row_bucket
from tinyvllm.engine.sizing import engine_programs
from tinyvllm.model.hub import LocalModel, resolve_model
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.executor import described
from tinyvllm.ops.op import Cost
from tinyvllm.ops.program import Op, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import InputError

OP_REPLAYS, STEP_REPLAYS, ROW_REPLAYS = 9, 25, 9
MIN_LAUNCHES = 64  # in the graph of one op: its start and end are then nothing to the whole


@dataclass(frozen=True)
class OpTime:
    """All ops of one kind and role in a step: times are of one of them, `count` of them run."""

    op: str
    count: int
    kernels: int  # launches of one
    us: float
    floor_us: float
    bytes: int
    flops: int
    share: float  # of the sum of all

    @property
    def ratio(self) -> float:
        return self.us / self.floor_us


@dataclass(frozen=True)
class StepTime:
    """A step at one batch and context: its ops, their sum, and all of it as one graph."""

    program: str
    batch: int
    context: int
    ops: tuple[OpTime, ...]
    sum_ms: float
    graph_ms: float
    floor_ms: float


class KernelBench:
    """A GPU with a model whose steps can be timed op by op; `close` frees everything."""

    def __init__(self, config: EngineConfig, rates: Rates, temperature: float = 0.0) -> None:
        self._model: LocalModel = resolve_model(config.model, config.load_format, config.revision)
        self._backend = open_backend(config, self._model)
        executor = self._backend.executor
        assert isinstance(executor, CudaExecutor)
        self.executor, self._rates, self._temperature = executor, rates, temperature
        programs = engine_programs(config, self._model.config, primitive=False)
        self.programs = {p.name: p for p in programs}
        self.limits = self._backend.limits
        vocab = self._model.config.vocab_size
        self._steps = SyntheticSteps(executor, self.limits, vocab)

    def step(self, phase: str, sampler: str, batch: int, context: int) -> StepTime:
        """Times a step: decode with `context` tokens a row, or prompts of `context` tokens."""
        program = f"{phase}.{sampler}"
        # The graph moves its rows on with each replay: the middle one has the context wanted.
        before = WARMUP_REPLAYS + STEP_REPLAYS // 2
        decode = phase == "decode"
        one = self.set_step(phase, sampler, batch, context)
        executor, stream = self.executor, self.executor.stream
        ops = self._time_ops(self.programs[program], one, context)
        position = context - 1 if decode else 0
        self._steps.set_position(max(0, position - before) if decode else 0)
        by_op = executor.launches_by_op(program, one.dims)
        if not decode:  # a prompt ends at another position: run again, it would start there
            by_op = [(op, launches) for op, launches in by_op if op.kind != "advance_rows"]
        with captured(itertools.chain(*(ls for _, ls in by_op)), stream) as graph:
            seconds = replay_seconds(graph, stream, STEP_REPLAYS)
        return StepTime(
            program,
            batch,
            context,
            ops,
            sum_ms=sum(op.us * op.count for op in ops) / 1e3,
            graph_ms=seconds * 1e3,
            floor_ms=sum(op.floor_us * op.count for op in ops) / 1e3,
        )

    def set_step(self, phase: str, sampler: str, batch: int, context: int) -> Batch:
        """Runs such a step once and moves its rows back, so that all of it can run again."""
        longest = context + STEP_REPLAYS - STEP_REPLAYS // 2
        self._steps.set_rows(batch, context - 1, longest, temperature=self._temperature)
        position = context - 1 if phase == "decode" else 0
        self._steps.set_position(position)
        decode = phase == "decode"
        one = self._steps.decode(batch, longest) if decode else self._steps.prefill(batch, context)
        self.executor.run(f"{phase}.{sampler}", one.dims, one.inputs, ()).discard()
        self._steps.set_position(position)
        return one

    def cycle_seconds(self, cycle: list[PreparedLaunch]) -> float:
        """Time of launches that run one after the other, repeated until their number is large."""
        repeat = math.ceil(MIN_LAUNCHES / len(cycle))
        with captured(cycle * repeat, self.executor.stream) as graph:
            return replay_seconds(graph, self.executor.stream, OP_REPLAYS) / repeat

    def floor(self, program: Program, op: Op, batch: Batch, context: int) -> tuple[Cost, float]:
        """What an op must do in such a step, and the seconds that this takes at the least."""
        dims = {**self.limits, **batch.dims, "C": context}
        act = self.executor.array("kv_cache").dtype
        cost = op_def(op.kind).cost(described(program, op, dims, act))
        return cost, self._rates.floor(cost.bytes, cost.flops)

    def _time_ops(self, program: Program, batch: Batch, context: int) -> tuple[OpTime, ...]:
        """Runs the step op by op, each at its place, where what it reads is valid.

        An op that all layers have is timed on all of them in turn, so that weights, K and V come
        from memory as in a step.
        """
        executor, stream = self.executor, self.executor.stream
        groups: dict[str, list[int]] = {}
        by_op = executor.launches_by_op(program.name, batch.dims)
        for i, (op, launches) in enumerate(by_op):
            if launches:
                groups.setdefault(op_label(op), []).append(i)
        timed, found = set(), []
        for op, launches in by_op:
            label = op_label(op)
            if launches and label not in timed:
                timed.add(label)
                cycle = [launch for i in groups[label] for launch in by_op[i][1]]
                count = len(groups[label])
                cost, floor = self.floor(program, op, batch, context)
                us = self.cycle_seconds(cycle) / count * 1e6
                row = OpTime(
                    label, count, len(launches), us, floor * 1e6, cost.bytes, cost.flops, 0.0
                )
                found.append(row)
            for launch in launches:
                launch.run(stream)
        total = sum(row.us * row.count for row in found)
        return tuple(replace(row, share=row.us * row.count / total) for row in found)

    def rows(self, sampler: str, context: int, counts: list[int]) -> list[tuple[int, int, float]]:
        """(rows, rows with padding, time over that of a graph without padding) for each count."""
        longest = context + WARMUP_REPLAYS + ROW_REPLAYS
        self._steps.set_rows(max(counts), context - 1, longest, temperature=self._temperature)
        program, limit = f"decode.{sampler}", self.limits["R"]
        result = []
        for bucket, inside in itertools.groupby(counts, lambda rows: row_bucket(rows, limit)):
            full = self._steps.decode(bucket, longest)
            with self._graph(program, full) as padded:
                for rows in inside:
                    if rows == bucket:
                        result.append((rows, bucket, 1.0))
                        continue
                    exact = self._steps.decode(rows, longest)
                    with self._graph(program, exact) as graph:
                        least = self._replayed(graph, program, exact, context)
                    step = self._steps.decode(rows, longest, bucket)
                    seconds = self._replayed(padded, program, step, context)
                    result.append((rows, bucket, seconds / least))
        return result

    def _graph(self, program: str, step: Batch) -> GraphExec:
        by_op = self.executor.launches_by_op(program, step.dims)
        return captured(itertools.chain(*(ls for _, ls in by_op)), self.executor.stream)

    def _replayed(self, graph: GraphExec, program: str, step: Batch, context: int) -> float:
        """Seconds of a replay with the inputs of this step, its rows at this context."""
        self._steps.set_position(context - 1)
        self.executor.run(program, step.dims, step.inputs, ()).discard()
        self._steps.set_position(context - 1)
        return replay_seconds(graph, self.executor.stream, ROW_REPLAYS)

    def close(self) -> None:
        self._backend.close()


def op_label(op: Op) -> str:
    """The op's kind, and of products the weight's last name: the same in all layers."""
    if "matmul" not in op.kind:
        return op.kind
    first, *others = op.operands["weight"].split("+")
    name = first.removesuffix(".weight").rpartition(".")[2]
    return f"{op.kind} {name}{'+' if others else ''}"


def bench_kernels(
    config: EngineConfig,
    *,
    phase: str,
    sampler: str,
    temperature: float,
    batches: list[int],
    contexts: list[int],
    rows: bool,
    as_json: bool,
    svg: str | None,
) -> None:
    """Times each op of a step for each batch and context; with `rows`, padded steps as well."""
    check_steps(batches, contexts)
    if reason := cuda_unavailable():
        raise InputError(f"bench kernels needs a GPU: {reason}")
    name, rates = device_rates(config)
    longest = max(contexts) + WARMUP_REPLAYS + STEP_REPLAYS + 1
    tokens = max(batches) * max(contexts) if phase == "prefill" else 0
    config = replace(
        config,
        device="cuda" if config.device == "auto" else config.device,
        max_model_len=longest,
        max_num_seqs=max(config.max_num_seqs, *batches),
        max_num_batched_tokens=max(config.max_num_batched_tokens, tokens),
    )
    steps, padded = [], {}
    with closing(KernelBench(config, rates, temperature)) as bench:
        for batch, context in itertools.product(batches, contexts):
            steps.append(bench.step(phase, sampler, batch, context))
            if not as_json:
                print_step(steps[-1])
        if rows:
            counts = list(range(1, bench.limits["R"] + 1))
            padded = {c: bench.rows(sampler, c, counts) for c in contexts}
    if as_json:
        head = {"device": name, **rates.figures()}
        print(json.dumps({**head, "steps": [asdict(s) for s in steps], "rows": padded}))
    else:
        print(f"{name}: copies at {rates.copy / 1e12:.2f} TB/s")
        for context, ratios in padded.items():
            _print_rows(context, ratios)
    if svg:
        title = f"{name}: " + ", ".join(f"{s.program} {s.batch} x {s.context}" for s in steps)
        points = [(op.op, op.flops, op.bytes, op.us / 1e6, op.share) for s in steps for op in s.ops]
        Path(svg).write_text(roofline_svg(title, rates.copy, rates.flops, points))


def print_step(step: StepTime) -> None:
    """A table of the step's ops."""
    print(f"{step.program}, batch {step.batch}, context {step.context}")
    print(
        f"{'op':<28} {'count':>5} {'kernels':>7} {'us':>9} {'floor':>8} {'ratio':>6} {'TB/s':>6} "
        f"{'TFLOP/s':>8} {'share':>6}"
    )
    for op in step.ops:
        print(
            f"{op.op:<28} {op.count:>5} {op.kernels:>7} {op.us:>9.2f} {op.floor_us:>8.2f} "
            f"{op.ratio:>6.2f} {op.bytes / op.us / 1e6:>6.2f} {op.flops / op.us / 1e6:>8.1f} "
            f"{op.share:>6.1%}"
        )
    kernels = sum(op.count * op.kernels for op in step.ops)
    print(
        f"sum {step.sum_ms:.3f} ms, as one graph of {kernels} kernels {step.graph_ms:.3f} ms, "
        f"floor {step.floor_ms:.3f} ms, graph / floor {step.graph_ms / step.floor_ms:.2f}\n"
    )


def _print_rows(context: int, ratios: list[tuple[int, int, float]]) -> None:
    """The largest ratios of padded to exact steps."""
    worst = sorted(ratios, key=lambda r: -r[2])
    above = sum(ratio > 1.1 for _, _, ratio in worst)
    shown = ", ".join(f"{rows} in {bucket}: {ratio:.3f}" for rows, bucket, ratio in worst[:8])
    print(
        f"context {context}: rows padded, time over that of an exact graph: above 1.10 for {above} "
        f"of {len(worst)}, at most {shown}"
    )
