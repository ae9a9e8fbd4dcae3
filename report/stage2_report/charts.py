"""The charts of one run, or of several in the same chart, as SVG: lines over optimizer steps, or stacked areas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from matplotlib.ticker import MaxNLocator

from stage2_report.run_history import REWARD, SPREAD, Points, RunHistory, reward_means

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 508, 10, 194
MOST_POINTS = 600
MARKED = 40  # points of a line up to which each is marked
SMOOTH = 120  # means that are drawn over a line of very many points
SHARE = (0.0, 1.0)
PARTS = (
    "generate", "wait", "encode", "match", "reward", "pack", "forward", "backward", "optimizer", "sync", "log", "other",
)  # fmt: skip
TIME = "Where the time of a step goes, in seconds"


@dataclass(frozen=True)
class _Figure:
    """A chart to draw: labels with keys of the log. limits: of its values, where they are fixed."""

    title: str
    lines: tuple[tuple[str, str], ...]
    limits: tuple[float, float] | None = None


_FIGURES = (
    _Figure("Loss", (("all", "loss"), ("text", "loss/ce"), ("coordinates", "loss/coord"))),
    _Figure(
        "Held-out: scores",
        (
            ("F1 with class, IoU 0.5", "eval_rollout_f1_class_iou50"),
            ("F1 of training's matching, IoU 0.5", "eval_rollout_f1_iou50"),
            ("AP", "eval_rollout_ap"),
            ("AP50", "eval_rollout_ap50"),
        ),
        SHARE,
    ),
    _Figure(
        "Held-out: precision and recall with class",
        (("precision", "eval_rollout_precision_class_iou50"), ("recall", "eval_rollout_recall_class_iou50")),
        SHARE,
    ),
    _Figure(
        "Held-out: form of the answers",
        (
            ("whole", "eval_rollout_parse_rate"),
            ("cut off", "eval_rollout_parse_truncated_rate"),
            ("repeating", "eval_rollout_loop_rate"),
            ("correctly named", "eval_rollout_desc_exact"),
        ),
        SHARE,
    ),
    _Figure(
        "Held-out: number of objects",
        (("for each true one", "eval_rollout_objects_per_truth"), ("off by", "eval_rollout_counting_error")),
    ),
    _Figure("Held-out: duplicates", (("objects", "eval_rollout_duplicates"),)),
    _Figure(
        "Training rollouts: matches",
        (("precision", "rollout/precision"), ("recall", "rollout/recall"), ("F1, IoU 0.5", "rollout/f1_iou50")),
        SHARE,
    ),
    _Figure(
        "Training rollouts: tokens of an answer",
        (
            ("mean", "rollout/gen_new_tokens_mean"),
            ("90 %", "rollout/gen_new_tokens_p90"),
            ("99 %", "rollout/gen_new_tokens_p99"),
        ),
    ),
    _Figure(
        "Drafts",
        (
            ("decode steps for each token", "rollout/decode_steps_per_token"),
            ("drafted tokens that were accepted", "rollout/draft_acceptance_rate"),
        ),
        SHARE,
    ),
    _Figure("Staleness of rollouts, in steps", (("mean", "rollout/staleness"),)),
    _Figure("Reward", (("mean", REWARD), ("spread", SPREAD))),
    _Figure("Held-out: reward", (("mean", f"eval_{REWARD}"),)),
    _Figure("Tokens of an answer", (("mean", "completions/mean_length"),)),
    _Figure(
        "Busy, as a share of the step",
        (("learner idle", "step/learner_idle_share"), ("servers busy", "step/server_busy_share")),
        SHARE,
    ),
    _Figure("Seconds of a weight push", (("push", "sync/seconds"),)),
    _Figure("Norm of the gradient", (("before clipping", "grad_norm"),)),
    _Figure("Learning rate", (("rate", "learning_rate"),)),
)


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart.

    stretches: its points, `x,y` in the SVG's units, separate where a number is missing; of very many points they are
    means, and `spread` has the lowest and highest. marks: points to mark, for a stretch of one point has no line.
    last: its last value.
    """

    label: str
    stretches: Sequence[str]
    marks: Sequence[tuple[float, float]]
    last: str
    spread: Sequence[str] = ()
    area: bool = False


@dataclass(frozen=True)
class LineChart:
    """A chart that a template draws. ticks: (position in the SVG, text)."""

    title: str
    lines: Sequence[ChartLine]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    x_range: tuple[float, float]
    y_range: tuple[float, float]


def run_charts(runs: Sequence[RunHistory]) -> list[LineChart]:
    """Return the charts of the figures that the runs have.

    One run has several lines in a chart. Of several runs each figure has its own chart, with a line for each run.
    """
    charts = []
    for one in (*_FIGURES, *_reward_figures(runs)):
        if len(runs) == 1:
            lines = [(label, _points(runs[0], key)) for label, key in one.lines]
            charts.append(line_chart(one.title, lines, limits=one.limits))
            continue
        for label, key in one.lines:
            title = f"{one.title}: {label}" if len(one.lines) > 1 else one.title
            charts.append(line_chart(title, [(run.name, _points(run, key)) for run in runs], limits=one.limits))
    times = [
        area_chart(
            TIME if len(runs) == 1 else f"{TIME}: {run.name}",
            [(part, run.steps.points(f"step/{part}_s")) for part in PARTS],
        )
        for run in runs
    ]
    return [chart for chart in (*charts[:1], *times, *charts[1:]) if chart is not None]


def _points(run: RunHistory, key: str) -> Points:
    return (run.evaluations if key.startswith("eval_") else run.steps).points(key)


def _reward_figures(runs: Sequence[RunHistory]) -> list[_Figure]:
    keys = dict.fromkeys(key for run in runs for key in run.steps.keys())  # noqa: SIM118 - no mapping
    lines = tuple(reward_means(keys).items())
    return [_Figure("Rewards", lines)] if lines else []


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def position(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, most: int, *, whole: bool = False) -> list[tuple[float, str]]:
        steps = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(self.low, self.high)
        return [(self.position(one), _text(one)) for one in map(float, steps) if self.low <= one <= self.high]


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
    """Return a chart of series of the same steps, stacked; None where there are none."""
    kept = [(label, averaged(points)) for label, points in series if any(value > 0 for _, value in points)]
    steps = sorted({step for _, points in kept for step, _ in points})
    if not kept:
        return None
    below = dict.fromkeys(steps, 0.0)
    layers = []
    for label, points in kept:
        own = {step: value for step, value in points if math.isfinite(value)}
        above = {step: below[step] + max(0.0, own.get(step, 0.0)) for step in steps}
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
    many = len(spread) < len(points)
    drawn = averaged(points, SMOOTH) if many else points
    parts = [list(part) for finite, part in groupby(drawn, key=_is_finite) if finite]
    marked = [part for part in parts if len(part) == 1 or sum(map(len, parts)) <= MARKED]
    marks = [(x.position(step), y.position(value)) for part in marked for step, value in part]
    return ChartLine(label, _stretches(drawn, x, y), marks, last, _stretches(spread, x, y) if many else ())


def _is_finite(point: tuple[int, float]) -> bool:
    return math.isfinite(point[1])


def _stretches(points: Points, x: _Axis, y: _Axis) -> list[str]:
    return [
        " ".join(f"{x.position(step)},{y.position(value)}" for step, value in part)
        for finite, part in groupby(points, key=_is_finite)
        if finite
    ]


def _outline(steps: Sequence[int], low: dict[int, float], high: dict[int, float], x: _Axis, y: _Axis) -> str:
    ends = (
        [(step, step) for step in steps] if len(steps) > 1 else [(steps[0] - 0.4, steps[0]), (steps[0] + 0.4, steps[0])]
    )
    upper = [f"{x.position(at)},{y.position(high[step])}" for at, step in ends]
    lower = [f"{x.position(at)},{y.position(low[step])}" for at, step in reversed(ends)]
    return " ".join([*upper, *lower])


def decimated(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points: the lowest and highest of each stretch of steps, so that no peak is lost."""
    if len(points) <= most:
        return points
    kept = {0, len(points) - 1}
    for indices in _split(len(points), (most - 2) // 2):
        finite = [index for index in indices if math.isfinite(points[index][1])] or [indices[0]]
        kept |= {min(finite, key=lambda index: points[index][1]), max(finite, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(kept)]


def averaged(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points, each the mean of a stretch: for stacked areas, where peaks would not add up."""
    if len(points) <= most:
        return points
    means = []
    for indices in _split(len(points), most):
        finite = [points[index][1] for index in indices if math.isfinite(points[index][1])]
        means.append((points[indices[-1]][0], sum(finite) / len(finite) if finite else math.nan))
    return means


def _split(count: int, parts: int) -> list[range]:
    ends = [round(count * part / parts) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends) if end > start]


def _text(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.3g}"
