"""What the dashboard sends, to whom, and how seldom it asks the engine; with a made-up engine."""

import asyncio
import base64
import json

import httpx
import numpy as np
import pytest

from tinyvllm.api.wire import Ready
from tinyvllm.config import EngineConfig
from tinyvllm.engine.events import Event
from tinyvllm.engine.view import EngineView, RequestView
from tinyvllm.serve import dashboard
from tinyvllm.serve.app import create_app
from tinyvllm.serve.config import ServeConfig
from tinyvllm.serve.page import FILES
from tinyvllm.serve.state import ServerState

READY = Ready(100, "a card", "somewhere", 1000)


class Engine:
    """Each look finds other blocks, and 100 tokens more."""

    config = EngineConfig(model="m")
    errored = False

    def __init__(self):
        self.looks = 0
        self.busy = False  # then no look succeeds
        self.cells = np.random.default_rng(0).integers(0, 9, 1000).astype("<u2")
        self.host_cells = np.zeros(50, "<u2")
        self._last = None

    async def get_view(self, seconds):
        self.looks += 1
        await asyncio.sleep(0.01)
        if not self.busy:
            self.cells[self.looks] ^= 1
            counters = dict.fromkeys(dashboard._COUNTERS, 100 * self.looks)
            request = RequestView("r</script>", 5, "decode", 3, 4, 1, 0, 0, 0)
            event = Event(0, 12.5, "swap", "r", "why")
            self._last = (
                {"kv_blocks_total": 1000, **counters},
                EngineView(
                    1.5, self.cells.tobytes(), self.host_cells.tobytes(), [request], 2, [event]
                ),
            )
        return self._last


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def get(engine):
    """Answers to requests of paths at once, by a new server with these options."""

    def ask(*paths, headers=None, **options):
        state = ServerState(engine, READY, None, None, ServeConfig(**options))
        transport = httpx.ASGITransport(create_app(state))

        async def work():
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.gather(*(client.get(path, headers=headers) for path in paths))

        return asyncio.run(work())

    return ask


def decoded(frame, name="cells"):
    return np.frombuffer(base64.b64decode(frame[name]), "<u2")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def frames(engine, clock):
    """Frames of one dashboard, a second after one another."""
    state = ServerState(engine, READY, None, None, ServeConfig())
    board = dashboard.Dashboard(state, clock)

    def ask(since="", seconds=1):
        clock.now += seconds
        return json.loads(asyncio.run(board.data(since, cells=True, packed=False)))

    return ask


def test_many_viewers_are_one_look(engine, get):
    answers = get(*["/dashboard/data"] * 20)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert engine.looks == 1


def test_without_a_viewer_there_is_no_look(engine, get):
    assert get("/version", "/dashboard", "/dashboard/main.js")[1].status_code == 200
    assert engine.looks == 0


def test_data_are_all_there(engine, get):
    (answer,) = get("/dashboard/data", headers={"Accept-Encoding": "identity"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    data = answer.json()
    assert (data["model"], data["device"], data["time"]) == ("m", "a card", 1.5)
    assert data["config"] == {
        "block_size": 16,
        "max_model_len": 100,
        "max_num_seqs": 512,
        "preemption_threshold": 0.85,
    }
    (request,) = data["requests"]
    assert (request["request_id"], request["label"], request["state"]) == (
        "r</script>",
        5,
        "decode",
    )
    assert data["requests_left_out"] == 2
    assert data["events"] == [
        {"number": 0, "time": 12.5, "kind": "swap", "request_id": "r", "detail": "why"}
    ]
    assert data["first_token"] == {"count": 0, "p50": None, "p99": None}
    assert (decoded(data) == engine.cells).all() and data["base"] is None
    assert data["rates"] is None, "there is nothing to compare with"


def test_packed_or_not_and_with_or_without_cells(get):
    (packed,) = get("/dashboard/data", headers={"Accept-Encoding": "gzip, br"})
    assert packed.headers["content-encoding"] == "gzip" and len(packed.json()["cells"]) == 2668
    (plain,) = get("/dashboard/data?cells=false", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and "cells" not in plain.json()
    assert get("/dashboard/data?cells=maybe")[0].status_code == 400


def test_who_has_a_frame_gets_the_change(engine, frames):
    first = frames()
    second = frames(first["id"])
    assert second["id"] != first["id"] and second["base"] == first["id"]
    changed = decoded(second)
    assert np.count_nonzero(changed) == 1
    assert ((decoded(first) ^ changed) == engine.cells).all()
    engine.host_cells[3] = 7
    third = frames(first["id"])
    assert third["base"] == first["id"] and np.count_nonzero(decoded(third, "host_cells")) == 1
    for since in ("", "nonsense", first["id"] + "0"):
        assert frames(since)["base"] is None
    for _ in range(dashboard._KEPT_FRAMES):
        last = frames(first["id"])
    assert last["base"] is None, "it is forgotten"
    engine.host_cells = engine.host_cells[:20]  # less could be pinned than was planned
    assert frames(last["id"])["base"] is None


def test_rates_are_of_the_time_between_two_frames(frames):
    first = frames()
    assert first["rates"] is None
    rates = frames(seconds=4)["rates"]
    assert rates == {**dict.fromkeys(dashboard._COUNTERS, 25.0), "seconds": 4.0}
    assert frames(seconds=60)["rates"] is None, "nobody has looked for a while"
    before = frames()
    assert frames(seconds=0.5)["id"] == before["id"] != first["id"], "it is too soon"


def test_while_the_engine_is_busy_the_last_frame_stays(engine, frames):
    first = frames()
    engine.busy = True
    again = frames(first["id"])
    assert frames(seconds=0.5)["id"] == first["id"] and engine.looks == 2, "one waits for all"
    assert again["id"] == again["base"] == first["id"] and not decoded(again).any()


def test_before_the_first_frame_there_is_an_error_to_try_again_after(engine, get):
    engine.busy = True
    for answer in get(*["/dashboard/data"] * 3):
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert engine.looks == 1


def test_the_page_is_open_and_its_data_are_not(engine, get):
    *pages, data, wrong = get(*FILES, "/dashboard/data", "/dashboard/other", api_key="k")
    assert [page.status_code for page in pages] == [200] * len(FILES)
    assert (data.status_code, wrong.status_code) == (401, 401)
    (data,) = get("/dashboard/data", headers={"Authorization": "Bearer k"}, api_key="k")
    assert data.status_code == 200
    assert engine.looks == 1


def test_the_page_forbids_all_that_it_does_not_need(get):
    for answer in get(*FILES):
        policy = answer.headers["content-security-policy"]
        for rule in ("default-src 'none'", "script-src 'self'", "trusted-types 'none'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = FILES["/dashboard"][1].decode()
    assert "://" not in page, "everything comes from the server"
    assert "<style" not in page and " style=" not in page and "<script>" not in page


def test_it_can_be_left_out(engine, get):
    answers = get(*FILES, "/dashboard/data", dashboard=False)
    assert {answer.status_code for answer in answers} == {404}
    assert engine.looks == 0
