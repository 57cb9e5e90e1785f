"""`tinyvllm bench throughput`: whole loads through the engine, next to their floors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyvllm.api.llm import LLM
from tinyvllm.bench.floors import device_rates
from tinyvllm.bench.loads import LOADS, Load
from tinyvllm.bench.run_load import LoadResult, run_load
from tinyvllm.bench.step_floors import StepFloors
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.model.hub import resolve_model
from tinyvllm.util import InputError


@dataclass(frozen=True)
class Setting:
    """Options of the engine that are compared."""

    max_num_seqs: int
    max_num_batched_tokens: int


def bench_throughput(
    config: EngineConfig,
    loads: Sequence[Load],
    settings: Sequence[Setting],
    *,
    runs: int,
    as_json: bool,
) -> None:
    """Runs each load with each setting, `runs` times, and prints a line for each run.

    In a first run CUDA graphs are captured; the prefix cache is emptied between runs. Raises
    InputError without a GPU.
    """
    if reason := cuda_unavailable():
        raise InputError(f"bench throughput needs a GPU: {reason}")
    check_int("runs", runs, 1, None)
    name, rates = device_rates(config)
    longest = max(load.longest for load in loads)
    rows: list[dict[str, Any]] = []
    if not as_json:
        print(f"{name}: copies at {rates.copy / 1e12:.2f} TB/s")
        _print_loads(loads)
        print(HEADER)
    for setting in settings:
        options = replace(config, **asdict(setting))
        if options.max_model_len is None:
            options = replace(options, max_model_len=longest)
        with LLM(**asdict(options)) as llm:
            floors = StepFloors(llm.engine.model.config, config.block_size, rates)
            for load in loads:
                for run in range(runs):
                    result = measure(llm.engine, load, shown=not as_json)
                    floor = floors.total(result.work)
                    rows.append(_row(load, setting, run, result, floor))
                    if not as_json:
                        print(_line(load, setting, run, result, floor), flush=True)
    if as_json:
        rivals = {load.name: dict(load.rivals) for load in loads}
        print(json.dumps({"device": name, "rivals": rivals, "rows": rows}))


def measure(engine: LLMEngine, load: Load, *, shown: bool) -> LoadResult:
    """A run of a load with an empty prefix cache."""
    engine.reset_prefix_cache()
    return run_load(engine, load, shown=shown)


def make_loads(config: EngineConfig, names: Sequence[str], seed: int) -> list[Load]:
    """The loads of these names, for the vocabulary of the configuration's model."""
    model = resolve_model(config.model, config.load_format, config.revision)
    return [LOADS[name](model.config.vocab_size, seed) for name in names]


def _row(
    load: Load, setting: Setting, run: int, result: LoadResult, floor: float
) -> dict[str, Any]:
    found = asdict(replace(result, work=[]))
    del found["work"]
    rates = {
        key: getattr(result, key)
        for key in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
    }
    head = {"load": load.name, **asdict(setting), "run": run}
    return {**head, **rates, "floor_s": floor, "ratio": result.seconds / floor, **found}


HEADER = (
    f"{'load':<12} {'seqs':>5} {'tokens':>6} {'run':>3} {'s':>7} {'floor':>6} {'ratio':>7} "
    f"{'out tok/s':>9} {'tok/s':>8} {'req/s':>6} {'TTFT p50':>9} {'p99 ms':>8} {'TBT p50':>8} "
    f"{'p99':>7} {'max ms':>7} {'preempt':>7} {'steps':>6} {'prompts':>7} {'late':>5} "
    f"{'host s':>7} {'waited':>7}"
)


def _line(load: Load, setting: Setting, run: int, r: LoadResult, floor: float) -> str:
    return (
        f"{load.name:<12} {setting.max_num_seqs:>5} {setting.max_num_batched_tokens:>6} {run:>3} "
        f"{r.seconds:>7.3f} {floor:>6.3f} {r.seconds / floor:>7.2f} "
        f"{r.output_tokens_per_s:>9.0f} {r.total_tokens_per_s:>8.0f} {r.requests_per_s:>6.1f} "
        f"{r.ttft.p50:>9.1f} {r.ttft.p99:>8.1f} {r.tbt.p50:>8.2f} {r.tbt.p99:>7.2f} "
        f"{r.tbt.max:>7.1f} {r.num_preemptions:>7} {r.num_steps:>6} {r.num_prompt_steps:>7} "
        f"{r.num_late_steps:>5} {r.host_s:>7.3f} {r.waited_s:>7.3f}"
    )


def _print_loads(loads: Sequence[Load]) -> None:
    for load in loads:
        print(
            f"{load.name}: {len(load.requests)} requests, {load.num_input_tokens} tokens in, "
            f"{load.num_output_tokens} out, temperature {load.temperature}"
        )
        for rival, rate in load.rivals:
            print(f"    {rival}: {rate:.0f} output tokens/s")
