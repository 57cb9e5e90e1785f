"""The OpenAI-compatible server (extra `serve`): requests over HTTP, answers from `AsyncLLM`."""
