"""Talks with a model, a line a turn, streaming the answers; an empty line ends it.

python examples/chat.py
"""

import argparse
import os
import sys

from tinyvllm import LLM, SamplingParams
from tinyvllm.model.hub import default_model
from tinyvllm.util import InputError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory, GGUF file, hub name (default: SmolLM2-135M)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of one answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args()

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    messages = []
    with LLM(args.model or default_model(), device=args.device) as llm:
        print("You: ", end="", flush=True, file=sys.stderr)
        for line in map(str.strip, sys.stdin):
            if not line:
                break
            messages.append({"role": "user", "content": line})
            answer = ""
            # The K and V of the conversation so far are found in the prefix cache.
            for output in llm.stream(llm.chat_prompt(messages), params):
                answer += output.outputs[0].text
                print(output.outputs[0].text, end="", flush=True)
            messages.append({"role": "assistant", "content": answer})
            print(flush=True)
            cached = f"[{output.num_cached_tokens} tokens cached]"
            print(f"{cached}\nYou: ", end="", flush=True, file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"{error}")
    except BrokenPipeError:  # the reader of a pipe went away; nor may the flush at exit complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
