"""Shows what priorities do: an urgent request that comes last, with few places, under two policies.

python examples/priorities.py
"""

import argparse
import sys

from tinyvllm import LLM, SamplingParams
from tinyvllm.model.hub import default_model
from tinyvllm.util import InputError

BACKGROUND, URGENT = 10, 0  # the lower, the more urgent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory, GGUF file, hub name (default: SmolLM2-135M)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args()

    model = args.model or default_model()
    for policy in ("fcfs", "priority"):
        print(f"{policy}:")
        options = {"device": args.device, "max_num_seqs": 2, "max_model_len": 256}
        with LLM(model, scheduling_policy=policy, **options) as llm:
            for request_id, step in finishing_order(llm):
                print(f"  {request_id} finished in step {step}")


def finishing_order(llm: LLM) -> list[tuple[str, int]]:
    """Requests and the steps in which they finished: six that can wait, then one that cannot."""
    engine, order, steps = llm.engine, [], 0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for i in range(6):
        engine.add_request(f"background {i}", f"Part {i} of", params, priority=BACKGROUND)
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 4:  # two are running, the others wait
            engine.add_request("urgent", "Now!", params, priority=URGENT)
        order += [(output.request_id, steps) for output in engine.step()]
    return order


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"{error}")
