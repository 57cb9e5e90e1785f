"""A roofline as SVG: operations a second over operations per byte, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 960, 560, 80, 60, 40
X_DECADES, Y_DECADES = (-1, 4), (10, 15)  # powers of ten shown

Point = tuple[str, int, int, float, float]  # name, operations, bytes, seconds, share of the step


def roofline_svg(title: str, copy_rate: float, flops: float, points: Iterable[Point]) -> str:
    """The picture: the card's two limits as a line, each op that computes as a circle.

    `copy_rate` in bytes a second, `flops` in operations a second (may be infinite: not known).
    A circle's area is the op's share of its step. Ops without floating-point operations have no
    place here.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_grid(),
    ]
    right = 10.0 ** X_DECADES[1]
    ridge = min(flops / copy_rate, right)
    corners = [(10.0 ** X_DECADES[0], copy_rate * 10.0 ** X_DECADES[0]), (ridge, copy_rate * ridge)]
    if ridge < right:
        corners.append((right, flops))
    line = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in corners)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#c33" stroke-width="2"/>')
    for name, operations, num_bytes, seconds, share in points:
        if operations == 0:
            continue
        x, y = _x(operations / num_bytes), _y(operations / seconds)
        radius = 3 + 20 * math.sqrt(share)
        tip = f"{name}: {seconds * 1e6:.1f} us, {num_bytes / seconds / 1e12:.2f} TB/s, {share:.1%}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#36c" fill-opacity="0.4">'
            f"<title>{escape(tip)}</title></circle>"
            f'<text x="{x + radius + 3:.1f}" y="{y + 4:.1f}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(value: float, decades: tuple[int, int]) -> float:
    """0 at the first power of ten shown, 1 at the last; values beyond stay at the edge."""
    low, high = decades
    return min(1.0, max(0.0, (math.log10(value) - low) / (high - low)))


def _x(intensity: float) -> float:
    return LEFT + (WIDTH - LEFT - MARGIN) * _place(intensity, X_DECADES)


def _y(rate: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - MARGIN) * _place(rate, Y_DECADES)


def _grid() -> list[str]:
    """Lines and labels at the powers of ten, and the axes' names."""
    parts = []
    for power in range(X_DECADES[0], X_DECADES[1] + 1):
        x = _x(10.0**power)
        parts.append(
            f'<path d="M{x:.1f} {MARGIN}V{HEIGHT - BOTTOM}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**power:g}'
            "</text>"
        )
    for power in range(Y_DECADES[0], Y_DECADES[1] + 1):
        y = _y(10.0**power)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (power - 12):g}'
            "</text>"
        )
    x, y = LEFT + (WIDTH - LEFT - MARGIN) // 2, HEIGHT - BOTTOM + 42
    parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">operations per byte</text>')
    middle = HEIGHT // 2
    parts.append(
        f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">'
        "TFLOP/s</text>"
    )
    return parts
