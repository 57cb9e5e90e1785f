"""Options generated from the configuration classes."""

import argparse
import dataclasses

import pytest

from tinyvllm.cli.options import Parser, add_options, from_args
from tinyvllm.config import EngineConfig
from tinyvllm.sampling_params import SamplingParams


def parse(config, *argv):
    parser = argparse.ArgumentParser()
    add_options(parser, config)
    return from_args(config, parser.parse_args(argv))


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_every_field_is_an_option_with_its_default(config):
    assert parse(config) == config()
    parser = argparse.ArgumentParser()
    add_options(parser, config)
    text = parser.format_help()
    for field in dataclasses.fields(config):
        assert (f"--{field.name.replace('_', '-')} " in text) == field.metadata["cli"]


def test_help_names_defaults_where_there_are_some():
    parser = Parser()
    add_options(parser, EngineConfig)
    parser.add_argument("--sizes", nargs="+", default=[8, 16], help="tokens")
    parser.set_defaults(block_size=32)  # as subcommands do
    text = " ".join(parser.format_help().split())
    assert "most sequences in one step (default: 512)" in text
    assert "tokens in one KV block (default: 32)" in text and "tokens (default: 8 16)" in text
    assert "in tokens (default: model's) --" in text, "what has one in its text has no other"
    assert "at first need --" in text and "on the hub --" in text, "nor has what is off, or nothing"


def test_options_have_the_types_of_their_fields():
    config = parse(
        EngineConfig,
        "--model",
        "m",
        "--max-model-len",
        "100",
        "--block-size",
        "32",
        "--gpu-memory-utilization",
        "0.5",
        "--device",
        "cpu",
    )
    assert config == EngineConfig(
        model="m", max_model_len=100, block_size=32, gpu_memory_utilization=0.5, device="cpu"
    )
    params = parse(
        SamplingParams,
        "--temperature",
        "0.7",
        "--ignore-eos",
        "--seed",
        "3",
        "--stop-token-ids=4",
        "--stop-token-ids=5",
    )
    assert params == SamplingParams(temperature=0.7, ignore_eos=True, seed=3, stop_token_ids=(4, 5))
    assert parse(SamplingParams, "--no-ignore-eos") == SamplingParams()


def test_a_field_may_be_left_out():
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig, leave_out="seed")
    assert from_args(EngineConfig, parser.parse_args([]), leave_out="seed") == EngineConfig()
    assert "--seed" not in parser.format_help()
