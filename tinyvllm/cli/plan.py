"""`tinyvllm plan`: what fits on a GPU and where each buffer lies, from the config alone."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from tinyvllm.cli.options import Commands, add_options, from_args
from tinyvllm.config import EngineConfig, check_number

DEFAULT_DEVICE = "H200"


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("plan", help="what fits on a GPU, and the plan of the buffers")
    parser.add_argument("model", help="preset, GGUF file or directory with a config.json")
    parser.add_argument(
        "--device-name",
        default=DEFAULT_DEVICE,
        help=f"the GPU to plan for, by its known properties (default: {DEFAULT_DEVICE})",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory free at start (default: all of that GPU's)",
    )
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        help="requests, a line each with the tokens of prompt and output (default: 512 drawn with "
        "the means of ShareGPT)",
    )
    parser.add_argument(
        "--phase", choices=("prefill", "decode"), default="prefill", help="whose buffers to show"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the buffers of that phase")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, EngineConfig, leave_out="model")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plan; returns 1 where the model does not fit."""
    from tinyvllm.bench.lengths import exponential_lengths, read_lengths
    from tinyvllm.driver.devices import DEVICES_BY_NAME
    from tinyvllm.model.hub import model_config
    from tinyvllm.planning.drawing import draw_plan
    from tinyvllm.planning.report import plan_report
    from tinyvllm.planning.text import buffers_text, report_text
    from tinyvllm.util import InputError

    config = replace(from_args(EngineConfig, args, leave_out="model"), model=args.model)
    if args.device_name not in DEVICES_BY_NAME:
        known = ", ".join(DEVICES_BY_NAME)
        raise InputError(f"device_name={args.device_name!r}: must be one of {known}")
    device = DEVICES_BY_NAME[args.device_name]
    if config.kernel_path == "portable":
        device = replace(device, kernel_path="portable")
    free_bytes = device.total_memory
    if args.gpu_memory is not None:
        check_number("gpu_memory", args.gpu_memory, 0.1, 1 << 20)
        free_bytes = int(args.gpu_memory * (1 << 30))
    lengths, note = exponential_lengths(512), "512 requests with the means of ShareGPT"
    if args.lengths:
        lengths = read_lengths(args.lengths)
        note = f"{len(lengths)} requests of {args.lengths}"
    report = plan_report(config, *model_config(args.model), device, free_bytes, lengths)
    shown = [b for b in report.buffers if b.program.name == f"{args.phase}.plain"][-1]
    if args.svg:
        Path(args.svg).write_text(draw_plan(shown))
        print(f"picture: {args.svg}", file=sys.stderr)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        print(report_text(report, note), buffers_text(shown), sep="\n\n")
    return 0 if report.memory else 1
