"""Draws where the buffers of a step lie, with no GPU.

python examples/plan_svg.py prefill.svg
"""

import argparse
from pathlib import Path

from tinyvllm import EngineConfig
from tinyvllm.driver.devices import DEVICES_BY_NAME
from tinyvllm.engine.sizing import engine_programs, model_dtype
from tinyvllm.model.hub import model_config
from tinyvllm.planning.drawing import draw_plan
from tinyvllm.planning.report import buffer_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--model", default="llama-3.2-1b", help="preset, directory or GGUF file")
    parser.add_argument("--program", default="prefill.plain", help="prefill or decode, and sampler")
    args = parser.parse_args()

    config = EngineConfig(model=args.model)
    where, model = model_config(args.model)
    programs = {p.name: p for p in engine_programs(config, model, primitive=False)}
    plan = buffer_plan(
        config,
        programs[args.program],
        model.max_context,
        model_dtype(config, model),
        DEVICES_BY_NAME["H200"],
    )
    args.svg.write_text(draw_plan(plan))
    print(f"{where}: {plan.title}, arena {plan.plan.arena_bytes} bytes, ", end="")
    print(f"{plan.ratio:.3f} x the least possible, without reuse {plan.plan.bytes_without_reuse}")
    for life in plan.lives:
        heirs = plan.heirs(life.name) if plan.layer(life) == 0 else []
        if heirs:
            print(f"the memory of {life.name} then serves {', '.join(heirs)}")


if __name__ == "__main__":
    main()
