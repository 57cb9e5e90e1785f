"""Completes a prompt, streaming the text: on the GPU if there is one, else on the CPU.

python examples/generate.py "The capital of France is"
"""

import time

START = time.perf_counter()  # before the imports, which count as much as anything else

import argparse  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from tinyvllm import LLM, SamplingParams  # noqa: E402
from tinyvllm.model.hub import default_model  # noqa: E402
from tinyvllm.util import InputError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", help="directory, GGUF file, hub name (default: SmolLM2-135M)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args()

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(args.model or default_model(), device=args.device) as llm:
        print(f"{llm.engine.model.where}\non {llm.engine.backend.device_name}\n", file=sys.stderr)
        begin = time.perf_counter()
        times = []
        for output in llm.stream(args.prompt, params):
            times.append(time.perf_counter())
            print(output.outputs[0].text, end="", flush=True)
    prompt, decode = len(output.prompt_token_ids), len(times) - 1
    print(f"\n\nprompt {prompt / (times[0] - begin):.1f} tokens/s", end="", file=sys.stderr)
    if decode:
        print(f", decode {decode / (times[-1] - times[0]):.1f} tokens/s", end="", file=sys.stderr)
    print(f", first token {times[0] - START:.2f} s after the start", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe went away; nor may the flush at exit complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
