"""Charts as SVG: lines over optimizer steps, or areas that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.ticker import MaxNLocator

from stage2_report.decimation import averaged, decimated
from stage2_report.run_history import Points

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 508, 10, 194
MARKED = 40  # points of a line up to which each is marked
SMOOTH = 120  # means that are drawn over a line of very many points


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart.

    stretches: its points, `x,y` in the SVG's units, apart where a number is missing; of very many points they are
    means, and `spread` has the lowest and highest. last: its last value.
    """

    label: str
    stretches: Sequence[str]
    marks: Sequence[tuple[float, float]]
    last: str
    spread: Sequence[str] = ()
    area: bool = False


@dataclass(frozen=True)
class LineChart:
    """A chart that a template draws. ticks: (place in the SVG, text)."""

    title: str
    lines: Sequence[ChartLine]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    x_range: tuple[float, float]
    y_range: tuple[float, float]


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, most: int, *, whole: bool = False) -> list[tuple[float, str]]:
        steps = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(self.low, self.high)
        return [(self.at(one), _text(one)) for one in map(float, steps) if self.low <= one <= self.high]


def line_chart(
    title: str, series: Sequence[tuple[str, Points]], *, limits: tuple[float, float] | None = None
) -> LineChart | None:
    """Return a chart of these series; None where none has a finite number. limits: of the values, where fixed."""
    kept = [(label, points) for label, points in series if any(math.isfinite(value) for _, value in points)]
    if not kept:
        return None
    x, y = _axes([point for _, points in kept for point in points], limits)
    return _chart(title, [_line(label, points, x, y) for label, points in kept], x, y)


def area_chart(title: str, series: Sequence[tuple[str, Points]]) -> LineChart | None:
    """Return a chart of series of the same steps, laid on one another; None where there are none."""
    kept = [(label, averaged(points)) for label, points in series if any(value > 0 for _, value in points)]
    steps = sorted({step for _, points in kept for step, _ in points})
    if not kept:
        return None
    below = dict.fromkeys(steps, 0.0)
    layers = []
    for label, points in kept:
        own = dict(points)
        above = {step: below[step] + max(0.0, _finite(own.get(step, 0.0))) for step in steps}
        layers.append((label, below, above, points[-1][1]))
        below = above
    x, y = _axes([(step, below[step]) for step in steps], (0.0, max(below.values()) * 1.05))
    areas = [
        ChartLine(label, [_outline(steps, low, high, x, y)], (), _text(last), area=True)
        for label, low, high, last in layers
    ]
    return _chart(title, areas, x, y)


def _chart(title: str, lines: Sequence[ChartLine], x: _Axis, y: _Axis) -> LineChart:
    return LineChart(title, lines, x.ticks(6, whole=True), y.ticks(5), (x.low, x.high), (y.low, y.high))


def _axes(points: Points, limits: tuple[float, float] | None) -> tuple[_Axis, _Axis]:
    steps = [step for step, _ in points]
    values = [value for _, value in points if math.isfinite(value)]
    low, high = limits or (min(values), max(values))
    room = 0.0 if limits else (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom = low - room if low < 0 else max(0.0, low - room)
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    return _Axis(first, last, LEFT, RIGHT), _Axis(bottom, high + room, BOTTOM, TOP)


def _line(label: str, points: Points, x: _Axis, y: _Axis) -> ChartLine:
    last, spread = _text(points[-1][1]), decimated(points)
    if len(spread) < len(points):
        return ChartLine(label, _stretches(averaged(points, SMOOTH), x, y), (), last, _stretches(spread, x, y))
    shown = [(x.at(step), y.at(value)) for step, value in points if math.isfinite(value)]
    return ChartLine(label, _stretches(points, x, y), shown if len(shown) <= MARKED else (), last)


def _stretches(points: Points, x: _Axis, y: _Axis) -> list[str]:
    return [
        " ".join(f"{x.at(step)},{y.at(value)}" for step, value in part)
        for finite, part in groupby(points, key=lambda point: math.isfinite(point[1]))
        if finite
    ]


def _outline(steps: Sequence[int], low: dict[int, float], high: dict[int, float], x: _Axis, y: _Axis) -> str:
    wide = [steps[0] - 0.4, *steps[1:-1], steps[-1] + 0.4] if len(steps) == 1 else steps
    ends = list(zip(wide, steps, strict=False)) if len(steps) > 1 else [(wide[0], steps[0]), (wide[-1], steps[0])]
    upper = [f"{x.at(place)},{y.at(high[step])}" for place, step in ends]
    lower = [f"{x.at(place)},{y.at(low[step])}" for place, step in reversed(ends)]
    return " ".join([*upper, *lower])


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _text(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.3g}"
