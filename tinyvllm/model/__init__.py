"""Models: configuration, checkpoints, tokenizers and forward passes as programs."""
