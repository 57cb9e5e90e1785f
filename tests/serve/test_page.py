"""The dashboard in a browser, of a real server at work. Pictures of it are left in build/."""

import json
import random
import threading
import time
from contextlib import suppress
from http.client import HTTPException

import pytest
from browser import browsing, find_browser
from serving import ROOT, serving

pytestmark = pytest.mark.skipif(not find_browser(), reason="there is no Chromium here")

NAME = "<img src=x onerror=hacked()>"
BLOCKS = 900
OPTIONS = [
    "--num-gpu-blocks-override", BLOCKS, "--max-num-seqs", 24, "--swap-space", 0.02,
    "--preemption-mode", "swap",
]  # fmt: skip
PICTURES = {"dark": (1280, True, 1), "light": (1280, False, 1), "phone": (390, True, 2)}
STATUS = "document.querySelector('#status').textContent"
LIVE = f"{STATUS} === 'Live'"


def keep_busy(server, seed, stop):
    """Requests one after another, many of which begin alike."""
    rng = random.Random(seed)
    while not stop.is_set():
        prompt = [7] * (160 * rng.randrange(2)) + [rng.randrange(500) for _ in range(50)]
        body = {"prompt": prompt, "max_tokens": rng.randrange(600, 1500), "ignore_eos": True}
        with suppress(OSError, HTTPException):  # the server has ended
            server.request("/v1/completions", body | {"stream": True})


@pytest.fixture(scope="module")
def busy(model):
    """A server whose blocks do not suffice for all its requests."""
    with serving(model, "--served-model-name", NAME, *OPTIONS) as server:
        stop = threading.Event()
        for seed in range(25):
            threading.Thread(target=keep_busy, args=(server, seed, stop), daemon=True).start()
        deadline = time.monotonic() + 120
        while not server.metric("vllm:num_preemptions_total") and time.monotonic() < deadline:
            time.sleep(0.2)
        yield server
        stop.set()


@pytest.fixture(scope="module")
def browser():
    with browsing() as page:
        yield page


@pytest.fixture
def page(busy, browser):
    """The page of the busy server, which shows something."""
    browser.show(1280, 900)
    browser.open(busy.url + "/dashboard")
    browser.wait(LIVE)
    yield browser
    assert browser.errors == []


def number(page, selector):
    """The first number of an element's text."""
    return float(page.text(selector).replace(",", "").split()[0].split("\u202f")[0])


def test_it_shows_what_the_engine_says(page):
    page.wait("document.querySelector('#events').children.length > 2")
    kinds = ("one", "shared", "copy", "cached", "free")
    assert sum(number(page, f"#legend [data-kind={kind}] dd") for kind in kinds) == BLOCKS
    assert number(page, "#preemptions") > 0
    assert "swapped out" in page.text("#events") and "Above the watermark" in page.text("#events")
    rows = page.run("document.querySelectorAll('#rows tr').length")
    assert page.text("#requests-note") == f"{rows} sequences" and rows > 10
    page.wait("parseFloat(document.querySelector('#generated').textContent) > 0")
    for tile in ("first", "next"):
        assert "median; p99" in page.text(f"#{tile}-more") or tile == "first"
    label = page.run("document.querySelector('#map').getAttribute('aria-label')")
    assert label.startswith("Map of the KV blocks: ") and " cached, " in label
    # Each second anew.
    before = page.text("#events") + page.text("#rows")
    page.wait(
        "document.querySelector('#events').textContent + document.querySelector('#rows')"
        f".textContent !== {json.dumps(before)}"
    )


def test_nothing_is_taken_for_html(page):
    assert page.text("#model").startswith(NAME)
    assert page.run("document.querySelectorAll('img').length") == 1  # the icon
    refused = page.run(
        "(() => { try { document.body.innerHTML = 'x'; } catch (e) { return e.name; } })()"
    )
    assert refused == "TypeError"
    page.errors.clear()  # which the browser told, too


def test_pictures_in_the_dark_in_the_light_and_on_a_phone(page):
    folder = ROOT / "build" / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    page.wait("document.querySelectorAll('#rows tr').length > 10")
    page.wait("/\\d/.test(document.querySelector('#generated').textContent)")
    drawn = {}
    for name, (width, dark, scale) in PICTURES.items():
        page.show(width, 900, dark=dark, scale=scale, mobile=name == "phone")
        before = number(page, "#generated")
        with suppress(AssertionError):  # the same number again is no harm
            page.wait(f"{LIVE} && parseFloat(document.querySelector('#generated')"
                      f".textContent.replace(',', '')) !== {before}", 5)  # fmt: skip
        (folder / f"{name}.png").write_bytes(page.picture(whole=True))
        assert page.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        drawn[name] = page.run(
            "(() => { const c = document.querySelector('#map'); const found = new Set(); const d ="
            " new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)"
            "; for (const pixel of d) found.add(pixel); return found.size; })()"
        )
    assert min(drawn.values()) > 12, "the sequences have colours of their own"


def test_keys_reach_everything(page):
    page.run("document.querySelector('#map').focus()")
    assert "Point at a cell" in page.text("#readout")
    page.press("ArrowRight")
    assert page.text("#readout").startswith("Block 0: ")
    page.press("ArrowRight")
    page.press("ArrowDown")
    told = page.text("#readout")
    assert told.startswith("Block ") and not told.startswith(("Block 0", "Block 1:"))
    assert page.text("#scale") == f"{BLOCKS} blocks; 1 cell = 1 block"
    page.press("+", "+")
    assert page.text("#scale").startswith("blocks ")
    page.press("End")
    assert f"to {BLOCKS - 1} of {BLOCKS}" in page.text("#scale")
    page.press("Escape")
    assert page.text("#scale").startswith(f"{BLOCKS} blocks")
    # From there on with the tabulator: zoom in, a scrolled table, and its first request.
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(page.run("document.activeElement.tagName + document.activeElement.id"))
        if page.run("document.activeElement.closest('tbody') !== null"):
            break
    assert "DIV" in seen and seen[-1] == "BUTTON"
    page.press("Enter", "\r")
    assert page.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.press("Enter", "\r")
    assert page.run("document.querySelectorAll('[aria-pressed=true]').length") == 0


def test_the_pointer_tells_what_is_in_a_cell(page):
    x, y = page.run(
        "(() => { const b = document.querySelector('#map').getBoundingClientRect();"
        " return [b.left + 3, b.top + 3]; })()"
    )
    page.move(x, y)
    assert page.text("#readout").startswith("Block 0: ")
    page.move(x, 2)
    assert page.text("#readout").startswith("Point at")


def test_so_many_blocks_that_a_cell_is_several_of_them(page):
    """What the page's own modules make of the cache of a large GPU."""
    result = page.run(
        """(async () => {
          const { fit, levels, tally, commonest, decode } = await import('/dashboard/cells.js');
          const all = levels(200000, 1200, 300);
          const room = ({ size, each }) =>
            Math.floor(1200 / size) * Math.floor(300 / size) * each;
          const cells = Uint16Array.from([0, 1, 1, 2, 3, 9, 9, 9, 8, 70]);
          return {
            fit: all[0], deepest: all.at(-1), fits: all.map((level) => room(level) >= 200000),
            none: fit(5, 0, 300), tally: tally(cells), part: tally(cells, 1, 4),
            commonest: commonest(cells, 0, 10), unused: commonest(cells, 0, 3),
            change: [...decode('AQADAA==', Uint16Array.from([4, 256]))],
          };
        })()"""
    )
    assert result["fit"]["each"] == 16 and result["fit"]["size"] >= 5
    assert result["deepest"] == {"size": 30, "each": 1}
    assert result["fits"] == [True] + [False] * (len(result["fits"]) - 1)
    assert result["none"]["each"] == 8, "a window without any width ends nothing"
    assert result["tally"] == {"free": 1, "cached": 2, "copy": 1, "shared": 1, "one": 5}
    assert result["part"] == {"free": 0, "cached": 2, "copy": 1, "shared": 0, "one": 0}
    assert result["commonest"] == [9, 3] and result["unused"] == [0, 0]
    assert result["change"] == [5, 259]


def test_it_asks_for_the_key_and_outlives_its_server(model, browser):
    options = ["--port", "PORT", "--api-key", "s3cret", "--num-gpu-blocks-override", 50]
    with serving(model, *options[2:]) as server:
        browser.open(server.url + "/dashboard")
        for key, then in (("wrong", "The key is not right"), ("s3cret", "Live")):
            browser.wait("!document.querySelector('#key').hidden")
            assert "key" in browser.run("document.activeElement.id")
            for letter in key:
                browser.press(letter, letter)
            browser.press("Enter", "\r")
            browser.wait(f"{STATUS} === {json.dumps(then)}")
        assert browser.text("#usage-more").startswith("0 of 50")
    browser.wait(f"{STATUS}.startsWith('Connection lost since ')")
    assert browser.run("document.querySelector('main').hidden") is False, "the last figures stay"
    with serving(model, "--port", server.port, *options[2:4], *options[4:5], 60):
        browser.wait(LIVE)
        assert browser.text("#usage-more").startswith("0 of 60")
        assert browser.text("#scale").startswith("60 blocks")
