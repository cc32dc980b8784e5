"""Curves over optimizer steps as inline SVG, which needs nothing but a browser."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 338, 10, 166
_MAX_MARKED, _MAX_STRETCHES = 40, 400
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """One line of a chart; its looks are classes of the page's style sheet."""

    label: str
    points: Points
    """Optimizer steps done, and finite values."""
    color: int
    dash: int


def chart(title: str, curves: Sequence[Curve], first: int, last: int) -> str:
    """A figure from one step to another, with a legend that has the last value of each curve that has points."""
    curves = [curve for curve in curves if curve.points]
    values = [value for curve in curves for _, value in curve.points]
    low = 0.0 if 0 <= min(values) < max(values) / 2 else min(values)
    heights = ticks(low, max(values) if max(values) > low else low + (abs(low) or 1.0))
    marks = [tick for tick in ticks(first, last) if first <= tick <= last and tick == int(tick)]

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - heights[0]) / (heights[-1] - heights[0])

    drawn, legend = [], []
    for tick in heights:
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        drawn.append(f'<text class="y" x="{_LEFT - 6}" y="{y(tick) + 3.5:.1f}">{number(tick)}</text>')
    for tick in marks:
        drawn.append(f'<text class="x" x="{x(tick):.1f}" y="{_BOTTOM + 17}">{tick:,.0f}</text>')
    for curve in curves:
        look, name = f"c{curve.color} d{curve.dash}", html.escape(curve.label)
        places = [f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(curve.points)]
        drawn.append(f'<polyline class="{look}" points="{" ".join(places)}"/>')
        for step, value in curve.points if len(curve.points) <= _MAX_MARKED else ():
            text = f"<title>{name}, step {step:,}: {number(value)}</title>"
            drawn.append(f'<circle class="{look}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.2">{text}</circle>')
        swatch = f'<svg class="swatch" viewBox="0 0 20 8"><line class="{look}" x1="0" x2="20" y1="4" y2="4"/></svg>'
        legend.append(f"<span>{swatch}{name} <b>{number(curve.points[-1][1])}</b></span>")
    what = html.escape(title)
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{what}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{what}</figcaption>{picture}<p class=legend>{' '.join(legend)}</p></figure>"


def ticks(low: float, high: float) -> list[float]:
    """Two to seven round numbers, the first at or below ``low`` and the last at or above ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4)) if high > low else 1.0
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [n * step for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def thinned(points: Points) -> Points:
    """All points of a short curve; of a long one the lowest and the highest of each stretch, so that peaks stay."""
    if len(points) <= 2 * _MAX_STRETCHES:
        return points
    size = math.ceil(len(points) / _MAX_STRETCHES)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        point for part in stretches for point in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    ]


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
