"""What `tinyvllm plan` says and draws: the memory of a model on a GPU, from the config alone."""
