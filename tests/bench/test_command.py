"""Options of a command are read back as the configuration that they were made of."""

import argparse
from dataclasses import fields

import pytest

from tinyvllm.bench.command import options_of
from tinyvllm.cli.options import Parser, add_options, from_args
from tinyvllm.config import EngineConfig


def test_what_is_left_as_it_is_needs_no_option():
    assert options_of(EngineConfig()) == []


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(model="a model", revision="main", dtype="float16", kernel_path="portable"),
        EngineConfig(device="cuda:3", swap_space=0, gpu_memory_utilization=0.5, block_size=32),
        EngineConfig(enable_prefix_caching=False, async_scheduling=False, wait_for_kernels=True),
        EngineConfig(async_scheduling=True, max_model_len=100, num_gpu_blocks_override=7, seed=3),
    ],
)
def test_options_are_read_back(config):
    parser = Parser()
    add_options(parser, EngineConfig)
    args: argparse.Namespace = parser.parse_args(options_of(config))
    assert from_args(EngineConfig, args) == config
    changed = [f.name for f in fields(config) if getattr(config, f.name) != f.default]
    assert {f"--{name.replace('_', '-')}" for name in changed} == {
        "--" + option.removeprefix("--no-").removeprefix("--")
        for option in options_of(config)
        if option.startswith("--")
    }
