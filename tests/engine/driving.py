"""What tests do with a scheduler and an engine: make one, run prompts, watch what is scheduled."""

from __future__ import annotations

from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.swapper import Swapper
from tinyvllm.outputs import RequestOutput
from tinyvllm.sampling_params import SamplingParams


def make_scheduler(
    blocks: BlockManager,
    *,
    seqs: int,
    budget: int,
    max_len: int,
    vocab: int = 50,
    swapper: Swapper | None = None,
    **options: object,
) -> Scheduler:
    """A scheduler without an engine: `options` are other options than its sizes."""
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, **options)
    return Scheduler(config, blocks, max_len, vocab, swapper)


def run(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """Outputs of all prompts, queued at once; `params` is one or one each."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = output
        engine.scheduler.check_integrity()
    engine.scheduler.end_copies()
    assert engine.scheduler.blocks.num_used == 0, "blocks are freed at once, or after their copies"
    return [outputs[i] for i in range(len(prompts))]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """The tokens of the first (or only) sequence of each."""
    return [output.outputs[0].token_ids for output in outputs]


def recorded(engine: LLMEngine) -> list[ScheduledStep]:
    """The steps that the engine schedules from now on."""
    steps, schedule = [], engine.scheduler.schedule

    def record() -> ScheduledStep | None:
        step = schedule()
        if step is not None:
            steps.append(step)
        return step

    engine.scheduler.schedule = record
    return steps
