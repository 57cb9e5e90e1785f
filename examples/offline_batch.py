"""Completes the prompts of a JSONL file into another one; run again, it goes on where it was.

Each line in is {"id": ..., "prompt": text} or {"id": ..., "messages": [...]}, with "max_tokens",
"temperature" and other sampling parameters if it likes. Each line out has the same id.

python examples/offline_batch.py prompts.jsonl answers.jsonl
"""

import argparse
import json
import sys
from pathlib import Path

from tinyvllm import LLM, SamplingParams
from tinyvllm.model.hub import default_model
from tinyvllm.progress import Progress
from tinyvllm.util import InputError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="directory, GGUF file, hub name (default: SmolLM2-135M)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args()

    records = read(args.input)
    done = finished_ids(args.output)
    todo = {key: record for key, record in records.items() if key not in done}
    print(f"{len(done)} done, {len(todo)} to do", file=sys.stderr)
    if not todo:
        return
    with (
        LLM(args.model or default_model(), device=args.device) as llm,
        open(args.output, "a") as out,
        Progress(len(todo), "Completed") as bar,
    ):
        for key, record in todo.items():
            llm.engine.add_request(key, *request(llm, key, record))
        tokens = 0
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():  # as they finish, not in the order of the input
                completion = output.outputs[0]
                tokens += len(completion.token_ids)
                line = {"id": records[output.request_id]["id"], "text": completion.text}
                line["finish_reason"] = completion.finish_reason
                print(json.dumps(line), file=out, flush=True)
                bar.update(1, f"{tokens} tokens")


def read(path: Path) -> dict[str, dict]:
    """The records by their ids as text."""
    records = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            key = json.dumps(record["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a record with an id: {error}") from None
        if key in records:
            raise InputError(f"{path}, line {number}: the id {key} comes twice")
        records[key] = record
    return records


def finished_ids(path: Path) -> set[str]:
    """Ids in the output so far. A last line that was cut short by a crash is removed."""
    if not path.exists():
        return set()
    whole, newline, _ = path.read_text().rpartition("\n")
    path.write_text(whole + newline)
    return {json.dumps(json.loads(line)["id"]) for line in whole.splitlines()}


def request(llm: LLM, key: str, record: dict) -> tuple:
    """Prompt and sampling parameters of a record."""
    options = {name: v for name, v in record.items() if name not in ("id", "prompt", "messages")}
    try:
        params = SamplingParams(**options)
        if "messages" in record:
            return llm.chat_prompt(record["messages"]), params
        return record["prompt"], params
    except (TypeError, KeyError, InputError) as error:
        raise InputError(f"record {key}: {error}") from None


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit("stopped; run it again to go on")
