"""The engine: requests, scheduling, batches and the loop over steps."""
