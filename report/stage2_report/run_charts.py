"""The charts of one run, or of several laid over one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stage2_report.line_chart import LineChart, area_chart, line_chart
from stage2_report.reward_keys import REWARD, SPREAD
from stage2_report.run_history import Points, RunHistory

SHARE = (0.0, 1.0)
PARTS = ("generate", "wait", "encode", "match", "pack", "forward", "backward", "optimizer", "sync", "log", "other")


@dataclass(frozen=True)
class _Asked:
    """A chart: labels with keys of the log. limits: of its values, where they are fixed."""

    title: str
    lines: tuple[tuple[str, str], ...]
    limits: tuple[float, float] | None = None


_CHARTS = (
    _Asked("Loss", (("all", "loss"), ("text", "loss/ce"), ("coordinates", "loss/coord"))),
    _Asked(
        "Held-out: scores",
        (
            ("F1 with class, IoU 0.5", "eval_rollout_f1_class_iou50"),
            ("F1 of training's matching", "eval_rollout_f1_iou50"),
            ("AP", "eval_rollout_ap"),
            ("AP50", "eval_rollout_ap50"),
        ),
        SHARE,
    ),
    _Asked(
        "Held-out: precision and recall with class",
        (("precision", "eval_rollout_precision_class_iou50"), ("recall", "eval_rollout_recall_class_iou50")),
        SHARE,
    ),
    _Asked(
        "Held-out: form of the answers",
        (
            ("whole", "eval_rollout_parse_rate"),
            ("cut off", "eval_rollout_parse_truncated_rate"),
            ("repeating", "eval_rollout_loop_rate"),
            ("named truly", "eval_rollout_desc_exact"),
        ),
        SHARE,
    ),
    _Asked(
        "Held-out: number of objects",
        (("for each true one", "eval_rollout_objects_per_truth"), ("off by", "eval_rollout_counting_error")),
    ),
    _Asked("Held-out: duplicates", (("objects", "eval_rollout_duplicates"),)),
    _Asked(
        "Training rollouts: matches",
        (("precision", "rollout/precision"), ("recall", "rollout/recall"), ("F1, IoU 0.5", "rollout/f1_iou50")),
        SHARE,
    ),
    _Asked(
        "Training rollouts: tokens of an answer",
        (
            ("mean", "rollout/gen_new_tokens_mean"),
            ("90 %", "rollout/gen_new_tokens_p90"),
            ("99 %", "rollout/gen_new_tokens_p99"),
        ),
    ),
    _Asked("Staleness of rollouts, in steps", (("mean", "rollout/staleness"),)),
    _Asked("Reward", (("mean", REWARD), ("spread", SPREAD))),
    _Asked("Held-out: reward", (("mean", "eval_reward"),)),
    _Asked("Tokens of an answer", (("mean", "completions/mean_length"),)),
    _Asked(
        "Busy, as a share of the step",
        (("learner idle", "step/learner_idle_share"), ("servers busy", "step/server_busy_share")),
        SHARE,
    ),
    _Asked("Seconds of a weight push", (("push", "sync/seconds"),)),
    _Asked("Norm of the gradient", (("before clipping", "grad_norm"),)),
    _Asked("Learning rate", (("rate", "learning_rate"),)),
)
TIME = "Where the time of a step goes, in seconds"


def run_charts(runs: Sequence[RunHistory]) -> list[LineChart]:
    """Return the charts of what the runs have. Of several, each figure has a chart, with a line for each run."""
    asked = [*_CHARTS, *_rewards(runs)]
    found = [_of_one(runs[0], one) for one in asked] if len(runs) == 1 else _of_several(runs, asked)
    times = [area_chart(TIME if len(runs) == 1 else f"{TIME}: {run.name}", _parts(run)) for run in runs]
    return [one for one in (*found[:1], *times, *found[1:]) if one is not None]


def _of_one(run: RunHistory, asked: _Asked) -> LineChart | None:
    return line_chart(asked.title, [(label, _points(run, key)) for label, key in asked.lines], limits=asked.limits)


def _of_several(runs: Sequence[RunHistory], asked: Sequence[_Asked]) -> list[LineChart | None]:
    return [
        line_chart(
            f"{one.title}: {label}" if len(one.lines) > 1 else one.title,
            [(run.name, _points(run, key)) for run in runs],
            limits=one.limits,
        )
        for one in asked
        for label, key in one.lines
    ]


def _points(run: RunHistory, key: str) -> Points:
    return (run.evaluations if key.startswith("eval_") else run.steps).points(key)


def _parts(run: RunHistory) -> list[tuple[str, Points]]:
    return [(part, run.steps.points(f"step/{part}_s")) for part in PARTS]


def _rewards(runs: Sequence[RunHistory]) -> list[_Asked]:
    keys = dict.fromkeys(key for run in runs for key in run.steps.keys())  # noqa: SIM118 - no mapping
    means = [key for key in keys if key.startswith("rewards/") and key.endswith("/mean")]
    lines = tuple((key.removeprefix("rewards/").removesuffix("/mean"), key) for key in means)
    return [_Asked("Rewards", lines)] if lines else []
