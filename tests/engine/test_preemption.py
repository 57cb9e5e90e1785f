import pytest

from tinyvllm.engine.preemption import RECOMPUTE, REMEMBERED, SWAP, RateMeter, cheaper

# 10 blocks of 100 bytes each way at 1000 bytes/s take 2 s; 40 tokens at 10 a second 4 s.
CASE = {
    "blocks_out": 10,
    "blocks_in": 10,
    "block_bytes": 100,
    "free_host_blocks": 10,
    "out_rate": 1000.0,
    "in_rate": 1000.0,
    "tokens": 40,
    "prefill_rate": 10.0,
}


@pytest.mark.parametrize(
    ("mode", "changes", "wanted", "reason"),
    [
        ("auto", {}, SWAP, r"10 blocks out and 10 in take 2000.00 ms, 40 tokens again 4000.00 ms"),
        ("auto", {"prefill_rate": 25.0}, RECOMPUTE, "40 tokens again 1600.00 ms"),
        ("auto", {"blocks_out": 0, "prefill_rate": 25.0}, SWAP, "0 blocks out and 10 in"),
        ("auto", {"in_rate": 300.0}, RECOMPUTE, "take 4333.33 ms"),
        ("auto", {"out_rate": 300.0}, RECOMPUTE, "take 4333.33 ms"),
        ("auto", {"tokens": 10}, RECOMPUTE, "10 tokens again 1000.00 ms"),
        ("auto", {"prefill_rate": None}, SWAP, "nothing is measured yet"),
        ("auto", {"out_rate": None, "in_rate": None}, SWAP, "nothing is measured yet"),
        ("auto", {"free_host_blocks": 9}, RECOMPUTE, "full: 10 blocks needed, 9 free"),
        ("swap", {"free_host_blocks": 9}, RECOMPUTE, "full: 10 blocks needed, 9 free"),
        ("swap", {"tokens": 1}, SWAP, "preemption_mode is swap"),
        ("recompute", {}, RECOMPUTE, "preemption_mode is recompute"),
    ],
)
def test_the_cheaper_one_is_chosen_and_the_reason_said(mode, changes, wanted, reason):
    have, why = cheaper(mode, **{**CASE, **changes})
    assert have == wanted
    assert reason in why


def test_a_rate_follows_the_last_seconds():
    meter = RateMeter()
    assert meter.rate is None
    meter.add(100, 1.0)
    assert meter.rate == 100
    for _ in range(50):
        meter.add(1000 * REMEMBERED, REMEMBERED)
    assert meter.rate == pytest.approx(1000, rel=1e-3)
