"""The buffer plan as an SVG: time across, addresses up, one rectangle for each buffer."""

from __future__ import annotations

from xml.sax.saxutils import escape

from tinyvllm.memory.plan import Lifetime
from tinyvllm.planning.report import BufferPlan
from tinyvllm.util import format_bytes

COLUMN, HEIGHT = 54, 560  # pixels of an op, and of the arena
LEFT, TOP, BOTTOM = 84, 44, 20  # margins: addresses, title, and below the names of the ops
CHAR, LINE = 6.1, 12  # pixels of a letter and a line of a label
MIN_LABEL = 13  # pixels of height from which on a rectangle has a label
GAP = 0.6  # of a column, where ops are left out

# Light fills with dark text in them are legible on white and on black; what stands on the
# background itself changes with it.
STYLE = """\
text{font:10px ui-monospace,Menlo,Consolas,monospace;fill:#24292f}
.title{font-size:14px}
.axis{stroke:#8c959f;stroke-width:1;fill:none}
rect{stroke:#57606a;stroke-width:.7}
text.in{fill:#1b1f24}
@media(prefers-color-scheme:dark){text{fill:#d0d7de}rect{stroke:#0d1117}}"""
FILLS = (
    *("#a5d6ff", "#ffdf5d", "#b4f1b4", "#ffc9c9", "#d8b9ff"),
    *("#ffd8a8", "#96e6e0", "#f5b8de", "#cfd8dc", "#dce775"),
)


def draw_plan(b: BufferPlan) -> str:
    """An SVG without outside assets; the same plan always gives the same text.

    Of the layers the first two and the last are drawn: the others repeat the second.
    """
    spans = _spans(b)
    width = LEFT + int(spans[-1][1]) + 16
    names = (f"{i} {op.kind}" for i, op in enumerate(b.program.ops))
    height = TOP + HEIGHT + int(CHAR * max(map(len, names))) + BOTTOM
    scale = HEIGHT / max(b.plan.arena_bytes, 1)
    title = (
        f"{b.title}: {format_bytes(b.plan.arena_bytes)} of arena for "
        f"{format_bytes(b.plan.bytes_without_reuse)} of buffers, lower bound "
        f"{format_bytes(b.plan.lower_bound)}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        *_address_axis(b.plan.arena_bytes, scale, width),
        *_op_axis(b, spans),
    ]
    fills: dict[str, str] = {}
    for life in sorted(b.lives, key=lambda life: (life.first, life.name)):
        x, end = LEFT + spans[life.first][0], LEFT + spans[life.last][1]
        if x == end:
            continue  # all of its ops are left out
        fill = fills.setdefault(life.role, FILLS[len(fills) % len(FILLS)])
        top = (b.plan.offsets[life.name] + life.size) * scale
        parts += _rectangle(life, x, TOP + HEIGHT - top, end - x, life.size * scale, fill)
    return "\n".join([*parts, "</svg>", ""])


def _is_drawn(layer: int | None, num_layers: int) -> bool:
    return layer in (None, 0, 1, num_layers - 1)


def _spans(b: BufferPlan) -> list[tuple[float, float]]:
    """Where each op begins and ends, in pixels, and the end of the program as one more.

    Ops that are left out have no width and lie at the end of the gap that stands for them.
    """
    spans: list[tuple[float, float]] = []
    x, left_out = 0.0, False
    for i in range(len(b.program.ops)):
        drawn = _is_drawn(b.op_layer(i), b.num_layers)
        x += GAP * COLUMN if not drawn and not left_out else 0
        spans.append((x, x + COLUMN if drawn else x))
        x, left_out = spans[-1][1], not drawn
    return [*spans, (x, x)]


def _address_axis(arena_bytes: int, scale: float, width: int) -> list[str]:
    step = 256
    while arena_bytes / step > 10:
        step *= 2
    parts = []
    for address in range(0, arena_bytes + 1, step):
        y = TOP + HEIGHT - address * scale
        parts.append(f'<path class="axis" opacity=".35" d="M{LEFT} {y:.1f}H{width - 12}"/>')
        label = format_bytes(address).replace(".00", "")
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{label}</text>')
    return parts


def _op_axis(b: BufferPlan, spans: list[tuple[float, float]]) -> list[str]:
    bottom = TOP + HEIGHT
    parts = []
    for i, op in enumerate(b.program.ops):
        start, end = spans[i]
        if start < end:
            x = LEFT + start + COLUMN / 2 + 3
            parts.append(
                f'<text transform="translate({x:.1f} {bottom + 10}) rotate(-90)" '
                f'text-anchor="end">{i} {op.kind}</text>'
            )
        if end < spans[i + 1][0]:
            x = LEFT + end + GAP * COLUMN / 2
            parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">...</text>')
    return parts


def _rectangle(
    life: Lifetime, x: float, y: float, width: float, height: float, fill: str
) -> list[str]:
    """The rectangle, with a tooltip, and the buffer's name in it where there is room."""
    tip = f"{life.name}: {format_bytes(life.size)}, ops {life.first} to {life.last}"
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0.8):.1f}" '
        f'fill="{fill}"><title>{escape(tip)}</title></rect>'
    ]
    lines = _wrapped(life.name, int((width - 4) / CHAR))
    if height < MIN_LABEL or height < LINE * len(lines):
        return parts
    first = y + height / 2 - LINE * (len(lines) - 1) / 2 + 3.5
    for i, line in enumerate(lines):
        parts.append(
            f'<text class="in" x="{x + width / 2:.1f}" y="{first + LINE * i:.1f}" '
            f'text-anchor="middle">{escape(line)}</text>'
        )
    return parts


def _wrapped(name: str, width: int) -> list[str]:
    """The name in lines of at most `width` letters where its parts allow it."""
    lines = [""]
    for part in name.replace("_", "_\n").replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines
