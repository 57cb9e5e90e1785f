"""Which events are kept, and when the watermark counts as passed."""

from tinyvllm.engine.events import MAX_EVENTS, EventLog


def log():
    times = iter(range(10_000))
    return EventLog(100, high=85, low=80, clock=lambda: float(next(times)))


def test_the_last_ones_are_kept_with_their_numbers():
    events = log()
    for i in range(MAX_EVENTS + 7):
        events.add("swap", f"r{i}", "why")
    numbers = [event.number for event in events.events]
    assert numbers == list(range(7, MAX_EVENTS + 7))
    assert events.events[0][1:] == (7.0, "swap", "r7", "why")


def test_use_around_the_watermark_is_one_event_until_it_has_fallen():
    events = log()
    for used in (0, 85, 86, 84, 86, 90, 81, 86, 80, 85, 80, 86):
        events.watch(used)
    assert [(e.kind, e.detail) for e in events.events] == [
        ("above", "86 of 100 blocks in use"),
        ("below", "80 of 100 blocks in use"),
        ("above", "86 of 100 blocks in use"),
    ]
    assert {e.request_id for e in events.events} == {""}
