"""Line charts as SVG text, legible on white and on black.

Draws what it is given on logarithmic axes; measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 36, 48  # margins; the names of the lines stand in the right one
COLOURS = ("#0f6fd8", "#e07b00", "#2a9d4a", "#c2365a", "#8250c8", "#7a7a7a")
LINE_HEIGHT = 14
_SUFFIXES = {1.0: "", 1e3: "k", 1e6: "M", 1e9: "G"}


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows; from and to are positive."""

    title: str
    low: float
    high: float

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 … 1 within them."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times the powers of ten in between; only the powers where that would be many."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(powers) <= 4 else (1,)
        marks = [step * 10.0**power for power in powers for step in steps]
        return [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]


def axis(title: str, values: Sequence[float]) -> Axis:
    """An axis on which these values, all positive, fit."""
    return Axis(title, min(values) / 1.1, max(values) * 1.1)


def line_chart(title: str, x_title: str, y_title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines by name, each of (x, y) in the order of x, all positive, on two logarithmic axes."""
    points = [point for line in lines.values() for point in line]
    x_axis, y_axis = axis(x_title, [x for x, _ in points]), axis(y_title, [y for _, y in points])
    body = [_text(LEFT, 20, title, "start", bold=True), *_grid(x_axis, y_axis)]
    ends = {name: _place(x_axis, y_axis, line[-1])[1] for name, line in lines.items()}
    labels = _apart(ends)
    for (name, line), colour in zip(lines.items(), cycle(COLOURS), strict=False):
        places = [_place(x_axis, y_axis, point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        body.append(_text(WIDTH - RIGHT + 8, labels[name] + 4, name, "start", colour))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *body, "</svg>", ""])


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    found = [_text((LEFT + right) / 2, HEIGHT - 10, x_axis.title, "middle"), _text(LEFT, 34, y_axis.title, "middle")]
    for mark in x_axis.ticks():
        x = LEFT + x_axis.share(mark) * (right - LEFT)
        found += [_rule(x, TOP + 6, x, bottom), _text(x, bottom + 16, _number(mark), "middle")]
    for mark in y_axis.ticks():
        y = bottom - y_axis.share(mark) * (bottom - TOP - 6)
        found += [_rule(LEFT, y, right, y), _text(LEFT - 6, y + 4, _number(mark), "end")]
    return found


def _place(x_axis: Axis, y_axis: Axis, point: tuple[float, float]) -> tuple[float, float]:
    bottom = HEIGHT - BOTTOM
    x = LEFT + x_axis.share(point[0]) * (WIDTH - RIGHT - LEFT)
    return x, bottom - y_axis.share(point[1]) * (bottom - TOP - 6)


def _apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Where names stand: at the ends of their lines, or as far below as the one above needs."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(ends.items(), key=lambda item: item[1]):
        last = placed[name] = max(y, last + LINE_HEIGHT)
    return placed


def _number(value: float) -> str:
    unit = max((unit for unit in _SUFFIXES if unit <= value), default=1.0)
    return f"{value / unit:g}{_SUFFIXES[unit]}"


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#888" stroke-opacity="0.35"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#888", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
