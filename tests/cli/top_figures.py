"""Figures of a server as `tinyvllm top` gets them, for tests."""

from tinyvllm.cli.top_screen import FIRST_LABEL, STATES

HEX = "d41a9e6106f74676b4b51ca9a9c80d4b"


def figures(**changes):
    stats = {
        "num_requests_running": 2, "num_requests_waiting": 1, "num_requests_swapped": 1,
        "kv_blocks_total": 1000, "kv_blocks_used": 500, "kv_blocks_cached": 200,
        "kv_blocks_free": 300, "kv_slots_used": 8000, "kv_slots_empty": 80,
        "pool_used": 1 << 30, "pool_reserved": 3 << 29, "pool_reserved_high": 2 << 30,
        "pool_budget": 4 << 30, "swap_used_bytes": 1 << 20, "swap_pinned_bytes": 64 << 20,
        "swap_total_bytes": 4 << 30, "swap_out_bytes": 5 << 20, "swap_in_bytes": 0,
        "num_preemptions": 3, "num_preemptions_swap": 2, "num_preemptions_recompute": 1,
        "prefix_cache_queries": 100, "prefix_cache_hits": 25,
    }  # fmt: skip
    requests = [
        {
            "request_id": f"cmpl-{HEX}-{i}", "label": FIRST_LABEL + i, "state": state,
            "prompt_tokens": 10, "output_tokens": 2000, "blocks": 126, "host_blocks": i,
            "priority": 0, "preemptions": 0,
        }
        for i, state in enumerate(STATES)
    ]  # fmt: skip
    rates = {
        "generation_tokens": 1234.5, "prefill_tokens": 56.78, "loop_steps": 100.0,
        "loop_seconds": 0.5, "seconds": 1.0,
    }  # fmt: skip
    event = {"number": 0, "time": 0.0, "kind": "swap", "request_id": f"cmpl-{HEX}", "detail": "why"}
    return {
        "model": "m", "device": "a card", "time": 0.0, "stats": stats, "rates": rates,
        "config": {"preemption_threshold": 0.85}, "requests": requests, "requests_left_out": 7,
        "first_token": {"count": 1, "p50": 0.0123, "p99": 1.5},
        "next_token": {"count": 0, "p50": None, "p99": None}, "events": [event],
        **changes,
    }  # fmt: skip
