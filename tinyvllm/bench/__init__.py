"""`tinyvllm bench`: each module measures one thing and prints it next to its floor."""
