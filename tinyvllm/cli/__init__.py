"""The `tinyvllm` command: one module a subcommand, with `add` (its options) and its run."""
