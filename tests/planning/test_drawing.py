"""The picture of a buffer plan: rectangles where the plan has its buffers, nothing from outside."""

import re
from xml.etree import ElementTree

import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.driver.devices import DEVICES_BY_NAME
from tinyvllm.engine.sizing import engine_programs
from tinyvllm.model.presets import PRESETS
from tinyvllm.planning.drawing import CHAR, COLUMN, HEIGHT, LEFT, TOP, draw_plan
from tinyvllm.planning.report import buffer_plan
from tinyvllm.util import DType

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def prefill():
    config = EngineConfig(model="llama-3.2-1b")
    program = engine_programs(config, PRESETS["llama-3.2-1b"], primitive=False)[0]
    return buffer_plan(config, program, 131072, DType.BF16, DEVICES_BY_NAME["H200"])


@pytest.fixture(scope="module")
def drawn(prefill):
    return ElementTree.fromstring(draw_plan(prefill))


def rectangles(drawn):
    """name -> (x, y, width, height)"""
    found = {}
    for rect in drawn.iter(f"{SVG}rect"):
        name = rect.find(f"{SVG}title").text.split(":")[0]
        found[name] = tuple(float(rect.get(a)) for a in ("x", "y", "width", "height"))
    return found


def test_rectangles_lie_where_and_when_the_buffers_do(prefill, drawn):
    found = rectangles(drawn)
    lives = {b.name: b for b in prefill.lives}
    for name in ("x", "layer0.input_layernorm", "layer0.silu_mul", "layer1.q"):
        x, y, width, height = found[name]
        life, scale = lives[name], HEIGHT / prefill.plan.arena_bytes
        assert x == LEFT + COLUMN * life.first and width == COLUMN * (life.last - life.first + 1)
        assert y == pytest.approx(TOP + HEIGHT - height - prefill.plan.offsets[name] * scale, abs=1)
        assert height == pytest.approx(life.size * scale, abs=0.1)


def test_no_two_rectangles_overlap(drawn):
    large = [r for r in rectangles(drawn).values() if r[3] > 2]
    for i, (x, y, width, height) in enumerate(large):
        for other_x, other_y, other_width, other_height in large[:i]:
            apart = x + width <= other_x + 0.2 or other_x + other_width <= x + 0.2
            assert apart or y + height <= other_y + 0.2 or other_y + other_height <= y + 0.2


def test_names_of_ops_are_not_cut_off(drawn):
    room = int(drawn.get("height")) - TOP - HEIGHT
    names = [t.text for t in drawn.iter(f"{SVG}text") if "rotate" in t.get("transform", "")]
    assert "5 matmul_rope_kv_write" in names and CHAR * max(map(len, names)) < room - 10


def test_repeating_layers_are_left_out(drawn):
    layers = {m[1] for name in rectangles(drawn) if (m := re.match(r"layer(\d+)\.silu_mul", name))}
    assert layers == {"0", "1", "15"}
    assert "..." in [text.text for text in drawn.iter(f"{SVG}text")]


def test_labels_stay_inside_and_nothing_comes_from_outside(prefill):
    text = draw_plan(prefill)
    assert text == draw_plan(prefill), "the same plan, the same picture"
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|url\(|@import|<image|<script", text)
    assert re.findall(r'https?://[^"]*', text) == ["http://www.w3.org/2000/svg"]
    assert "layer0.input_" in text and "7 matmul_add" in text
