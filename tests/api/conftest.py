"""Golden prompts with their outputs."""

import json

import pytest


@pytest.fixture(scope="session")
def cases(golden):
    """(prompt, greedy output) pairs of token ids, of the golden model `llama_bias`."""
    cases = json.loads((golden / "llama_bias" / "golden.json").read_text())["cases"]
    return [(c["prompt_token_ids"], c["output_token_ids"]) for c in cases]
