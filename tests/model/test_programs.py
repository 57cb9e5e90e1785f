"""The programs beside a step: they fit the step's buffers and weights."""

from dataclasses import replace

import pytest

from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import edits_program, logprobs_program, score_program, step_program
from tinyvllm.model.registry import ARCHITECTURES, Architecture
from tinyvllm.ops.lower import lower
from tinyvllm.ops.program import OUTPUT
from tinyvllm.util import DType

LLAMA = replace(PRESETS["llama-3.2-1b"], num_hidden_layers=2)


@pytest.mark.parametrize(("sampler", "logits"), [("plain", False), ("filter", True)])
def test_the_architecture_says_what_is_emitted(monkeypatch, sampler, logits):
    """The layers in order, the last into an output named hidden; the head for logits and scores.

    The logits are an output too, but of a plain step.
    """
    calls = []

    def embed(p, c, out):
        calls.append(("embed", out))
        return p.buffer(out, ("T", c.hidden_size))

    def decoder_layer(p, c, layer, x, out, kind):
        calls.append((layer, x, out, kind == OUTPUT))
        return p.buffer(out, ("T", c.hidden_size), None, kind)

    def head(p, c, x, out, kind):
        calls.append(("head", x, out, kind == OUTPUT))
        return p.buffer(out, (p.shape_of(x)[0], c.vocab_size), DType.F32, kind)

    monkeypatch.setitem(ARCHITECTURES, "Mine", Architecture(embed, decoder_layer, head))
    mine = replace(LLAMA, architecture="Mine")
    step_program(mine, "step", block_size=16, sampler=sampler)
    score_program(mine, "score")
    assert calls == [
        ("embed", "x"),
        (0, "x", "layer0.x", False),
        (1, "layer0.x", "hidden", True),
        ("head", "sampled_x", "logits", logits),
        ("head", "scored_x", "score_logits", False),
    ]


def test_the_program_of_edits_has_the_states_and_inputs_of_a_step():
    step, edits = step_program(LLAMA, "step", block_size=8), edits_program("edits")
    assert [op.kind for op in edits.ops] == ["apply_edits"]
    for name, buffer in edits.buffers.items():
        assert step.buffers[name] == buffer


@pytest.mark.parametrize("make", [logprobs_program, score_program])
def test_programs_that_follow_need_only_weights_of_the_step(make):
    config = replace(LLAMA, tie_word_embeddings=False)
    step = lower(step_program(config, "step", block_size=8), "prefill")
    for name, weight in make(config, "follow").weights.items():
        assert step.weights[name] == weight
