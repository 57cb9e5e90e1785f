"""Brings up to date what the documents take from the program.

python docs/refresh.py               the pictures; needs no GPU
python docs/refresh.py trace.jsonl   also the listings in cuda-calls.md, from a trace on a GPU
"""

import json
import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

from tinyvllm.config import EngineConfig
from tinyvllm.driver.devices import DEVICES_BY_NAME
from tinyvllm.driver.recorder import Call
from tinyvllm.driver.trace_formats import Text
from tinyvllm.engine.sizing import engine_programs, model_dtype
from tinyvllm.model.presets import PRESETS
from tinyvllm.planning.drawing import draw_plan
from tinyvllm.planning.report import buffer_plan

DOCS = Path(__file__).parent
CALLS = DOCS / "cuda-calls.md"
HEAD, TAIL, WIDTH = 18, 4, 240  # lines of a listing from the start and the end of a phase; letters
# Where the sources and CUDA's headers lie on the machine of the trace: of no interest.
PLACE = re.compile(r"(?:/[\w.+-]+)*/(?=cuda_src\b|nvidia/|include\b)")


def pictures() -> dict[str, str]:
    """The pictures by file name: what `tinyvllm plan llama-3.2-1b --svg` draws."""
    config, model = EngineConfig(model="llama-3.2-1b"), PRESETS["llama-3.2-1b"]
    drawn = {}
    for program in engine_programs(config, model, primitive=False):
        phase, _, sampler = program.name.partition(".")
        if sampler == "plain":
            act = model_dtype(config, model)
            device = DEVICES_BY_NAME["H200"]
            drawn[f"plan-{phase}.svg"] = draw_plan(
                buffer_plan(config, program, model.max_context, act, device)
            )
    return drawn


def read_calls(path: Path) -> list[Call]:
    """The calls of a trace in JSON lines, `start` counted from its beginning."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Call(**{k: v for k, v in e.items() if k != "event"}) for e in events if e["event"] == "call"
    ]


def listing(calls: list[Call], phase: str) -> str:
    """A phase's calls: the first of each row of equal ones; of many threads the first alone."""
    chosen = [c for c in calls if c.phase == phase]
    if phase == "compile":
        first = next((c.thread for c in chosen if c.thread != "MainThread"), "MainThread")
        chosen = [c for c in chosen if c.thread in (first, "MainThread")]
    lines, text = [], Text()
    for _, row in groupby(chosen, key=lambda c: (c.name, c.args.get("kernel"))):
        same = list(row)
        line = PLACE.sub("", text.call(same[0], same[0].start).rstrip())
        line = line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
        lines.append((len(same), line + (f"   (x {len(same)})" if len(same) > 1 else "")))
    if len(lines) > HEAD + TAIL + 1:
        left_out = sum(count for count, _ in lines[HEAD:-TAIL])
        lines[HEAD:-TAIL] = [(0, f"... {left_out} more calls ...")]
    return "\n".join(["```", *(line for _, line in lines), "```"])


def totals(calls: list[Call]) -> str:
    """Calls of each phase and the host's time in them, as a table."""
    rows = ["| phase | calls | host ms in them | most frequent |", "| --- | --- | --- | --- |"]
    for phase in dict.fromkeys(c.phase for c in calls):
        own = [c for c in calls if c.phase == phase]
        (name, count), *_ = Counter(c.name for c in own).most_common(1)
        ms = sum(c.seconds for c in own) * 1e3
        rows.append(f"| {phase} | {len(own)} | {ms:.1f} | `{name}` ({count}) |")
    return "\n".join(rows)


def filled(text: str, calls: list[Call]) -> str:
    """The document with its listings and its table made from these calls."""
    return re.sub(
        r"<!-- (totals|listing: ([\w-]+)) -->\n.*?<!-- end -->",
        lambda m: (
            f"<!-- {m[1]} -->\n{listing(calls, m[2]) if m[2] else totals(calls)}\n<!-- end -->"
        ),
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    for name, svg in pictures().items():
        (DOCS / name).write_text(svg)
    for argument in sys.argv[1:]:
        CALLS.write_text(filled(CALLS.read_text(), read_calls(Path(argument))))


if __name__ == "__main__":
    main()
