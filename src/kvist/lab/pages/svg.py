"""Small charts as SVG text: lines over a logarithmic axis, and one stacked bar.

Owns scales, ticks and where labels go. Knows nothing of what is drawn. Colours are those of Okabe
and Ito, which most people can tell apart; a line also has its name at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 96, 14, 44
_LABEL_GAP = 13.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a name, and points whose coordinates are both above 0."""

    name: str
    points: Sequence[tuple[float, float]]
    is_limit: bool = False


def line_chart(
    lines: Sequence[Line],
    x_title: str,
    y_title: str,
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """Draw lines over two logarithmic axes; an empty text where there is nothing to draw.

    Parameters
    ----------
    x_text, y_text : callable
        How a number is written at an axis.
    """
    lines = [
        Line(line.name, [(x, y) for x, y in line.points if x > 0 and y > 0], line.is_limit)
        for line in lines
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    x_axis = _Axis([x for line in lines for x, _ in line.points], _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis([y for line in lines for _, y in line.points], _HEIGHT - _BOTTOM, _TOP)
    about = escape(f"{y_title} over {x_title}")
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{about}">']
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{y_axis.low}"/>'
        )
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, x_text(tick), "middle"))
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 8, y + 4, y_text(tick), "end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_title, "middle"))
    parts.append(
        f'<text transform="translate(13 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)"'
        f' text-anchor="middle">{escape(y_title)}</text>'
    )
    ends: list[tuple[float, str, str]] = []
    for number, line in enumerate(lines):
        colour = "currentColor" if line.is_limit else PALETTE[number % len(PALETTE)]
        dash = ' stroke-dasharray="6 4"' if line.is_limit else ""
        points = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        if not line.is_limit:
            for x, y in line.points:
                parts.append(
                    f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2.5"'
                    f' fill="{colour}"/>'
                )
        ends.append((y_axis.at(line.points[-1][1]), line.name, colour))
    parts += _names(ends)
    parts.append("</svg>")
    return "".join(parts)


def stacked_bar(
    pieces: Sequence[tuple[str, float]], whole: float | None, text: Callable[[float], str]
) -> str:
    """Draw pieces side by side, and where `whole` ends, which may be before they do."""
    pieces = [(name, size) for name, size in pieces if size > 0]
    total = max(math.fsum(size for _, size in pieces), whole or 0.0)
    if not pieces or total <= 0:
        return ""
    width = _WIDTH - 20
    parts = [f'<svg viewBox="0 0 {_WIDTH} 84" role="img" aria-label="memory">']
    x = 10.0
    legend = 10.0
    for number, (name, size) in enumerate(pieces):
        colour = PALETTE[number % len(PALETTE)]
        long = width * size / total
        parts.append(f'<rect x="{x:.1f}" y="18" width="{long:.1f}" height="26" fill="{colour}"/>')
        label = f"{name} {text(size)}"
        parts.append(f'<rect x="{legend:.1f}" y="60" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(legend + 15, 69, label, "start"))
        legend += 34 + 6.6 * len(label)
        x += long
    if whole:
        end = 10 + width * whole / total
        parts.append(f'<rect class="frame" x="10" y="18" width="{end - 10:.1f}" height="26"/>')
        parts.append(f'<line class="edge" x1="{end:.1f}" y1="12" x2="{end:.1f}" y2="50"/>')
        parts.append(_text(min(end, _WIDTH - 10), 10, f"budget {text(whole)}", "end"))
    parts.append("</svg>")
    return "".join(parts)


class _Axis:
    """A logarithmic scale from numbers to places, with ticks at powers of two."""

    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        self.low, self._high = low, high
        self._first, self._last = math.log2(min(values)), math.log2(max(values))
        if self._last - self._first < 1:
            self._first, self._last = self._first - 0.5, self._last + 0.5

    def at(self, value: float) -> float:
        share = (math.log2(value) - self._first) / (self._last - self._first)
        return self.low + share * (self._high - self.low)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self._first - 1e-9), math.floor(self._last + 1e-9)
        step = max(1, (last - first) // 7 + 1)
        return [2.0**power for power in range(first, last + 1, step)]


def _names(ends: Sequence[tuple[float, str, str]]) -> list[str]:
    """Write names at the ends of lines, apart from each other."""
    parts = []
    lowest = -math.inf
    for y, name, colour in sorted(ends):
        y = max(y, lowest + _LABEL_GAP)
        lowest = y
        x, style = _WIDTH - _RIGHT + 8, f"fill:{colour}"
        parts.append(f'<text x="{x}" y="{y + 4:.1f}" style="{style}">{escape(name)}</text>')
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
