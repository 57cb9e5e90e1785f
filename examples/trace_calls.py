"""Traces a short generation and counts what happened.

python examples/trace_calls.py

On a GPU it counts the CUDA calls of each phase; on the CPU, which has none, the ops.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from tinyvllm import LLM, SamplingParams
from tinyvllm.model.hub import default_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory, GGUF file, hub name (default: SmolLM2-135M)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--max-model-len", type=int, default=512)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        options = {"device": args.device, "max_model_len": args.max_model_len}
        with LLM(args.model or default_model(), trace=path, **options) as llm:
            llm.generate("ab", SamplingParams(temperature=0, max_tokens=4))
        events = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter((e["phase"], e["name"]) for e in events if e["event"] in ("call", "op"))
    times = Counter()
    for e in events:
        if e["event"] in ("call", "op"):
            times[e["phase"], e["name"]] += e["seconds"]
        elif e["event"] == "note":
            print(e["text"])
    for (phase, name), count in counts.items():
        print(f"{phase:<10} {count:>5} x {name:<28} {times[phase, name] * 1e6:>10.0f} us")


if __name__ == "__main__":
    main()
