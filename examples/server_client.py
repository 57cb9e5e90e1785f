"""Asks a running server with the official client (pip install openai): a chat, then a completion.

tinyvllm serve path/to/model &
python examples/server_client.py "Why is the sky blue?"
"""

import argparse
import os
import sys

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()

    key = os.environ.get("TINYVLLM_API_KEY", "none")
    with openai.OpenAI(base_url=args.base_url, api_key=key) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": args.prompt}],
            max_completion_tokens=args.max_tokens,
            temperature=args.temperature,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n[{model}: {chunk.usage.completion_tokens} tokens]", file=sys.stderr)

        # vLLM's further options travel in extra_body.
        completion = client.completions.create(
            model=model,
            prompt=args.prompt,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            logprobs=1,
            extra_body={"top_k": 20, "repetition_penalty": 1.1},
        )
        print(completion.choices[0].text)
        logprobs = completion.choices[0].logprobs.token_logprobs
        print(f"[mean log-probability {sum(logprobs) / len(logprobs):.2f}]", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"{error.request.url}: {error} Is `tinyvllm serve` running there?")
    except openai.APIError as error:
        sys.exit(f"{error}")
