"""What tables, page, metrics endpoint and status show of the hand-made steps is what the oracles say."""

from __future__ import annotations

import json
import math

import pytest
from prometheus_client import CollectorRegistry

from stage2_report.charts import _FIGURES, run_charts
from stage2_report.run_history import REWARD, SPREAD, read_history
from stage2_report.tables import _EVALUATION_COLUMNS, _STEP_COLUMNS, EvaluationRows, StepRows
from stage2_trainer.learner.step_record import StepRecord, evaluation_metrics
from stage2_trainer.telemetry.prometheus import COUNTERS, GAUGES, MeteredLog
from stage2_trainer.telemetry.run_log import SilentLog
from stage2_trainer.telemetry.timeline import Stopwatch
from tests.unit.trainer.figures.hand_made import STEPS, TOP_K, Step
from tests.unit.trainer.figures.oracles import OF_AN_EVALUATION, OF_SAMPLES
from tests.unit.trainer.log_page import PAGE

RUN = [Step(samples) for samples in STEPS.values()]
HELD_OUT = [Step([one for one in step.all if not (one.bad or one.skipped)]) for step in RUN]
OF_MATCHING = ("precision", "recall", "f1", "matched_maskiou_mean", "recall_iou50", "f1_iou50")


@pytest.fixture(scope="module")
def lines():
    """The log of a run of all hand-made steps, each of which is evaluated, too."""
    written = []
    for number, (step, held_out) in enumerate(zip(RUN, HELD_OUT, strict=True), 1):
        watch = Stopwatch()
        watch.seconds["rollout_generate"] = step.seconds
        record = StepRecord(stopwatch=watch, samples=[one.stats() for one in step.all])
        found = evaluation_metrics([one.stats() for one in held_out.all], top_k=TOP_K)
        evaluation = {f"eval_{name}": value for name, value in found.items()}
        written.append({"event": "step", "step": number, **record.figures(top_k=TOP_K)})
        written.append({"event": "evaluation", "step": number, **evaluation})
    return [json.loads(json.dumps(one, allow_nan=False)) for one in written]


def column(table, title):
    """The cells of a column."""
    (found,) = [one for one in table.columns if one.header == title]
    return [*found.cells]


SHOWN = {
    "parsed": lambda s: s.answered,
    "matched": lambda s: s.found,
    "following": lambda s: s.following,
    "missed": lambda s: s.true - s.found,
}


@pytest.mark.parametrize("title", SHOWN)
def test_step_table_column_equals_oracle(title, lines):
    rows = StepRows()
    for line in lines[0::2]:
        rows.add(line)
    assert column(rows.table(), title) == [f"{SHOWN[title](step):.0f}" for step in RUN]


@pytest.mark.parametrize("name", OF_MATCHING)
def test_evaluation_table_column_is_blank_where_metric_is_undefined(name, lines):
    rows = EvaluationRows()
    for line in lines[1::2]:
        rows.add(line)
    expected = [OF_SAMPLES[OF_AN_EVALUATION[f"rollout_{name}"]](step) for step in HELD_OUT]
    assert None in expected
    assert column(rows.table(), _EVALUATION_COLUMNS[name]) == ["" if one is None else f"{one:.3f}" for one in expected]


@pytest.fixture(scope="module")
def history(lines, tmp_path_factory):
    """The same log as the page reads it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "stage2_log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return read_history(folder)


CHARTS = {
    (figure.title, label): key
    for figure in _FIGURES
    for label, key in figure.lines
    if key in OF_SAMPLES or key.removeprefix("eval_") in OF_AN_EVALUATION
}


@pytest.mark.parametrize(("title", "label"), CHARTS)
def test_chart_line_has_gap_where_metric_is_undefined(title, label, history):
    key = CHARTS[title, label]
    oracle, steps = (
        (OF_SAMPLES[key], RUN)
        if key in OF_SAMPLES
        else (OF_SAMPLES[OF_AN_EVALUATION[key.removeprefix("eval_")]], HELD_OUT)
    )
    expected = [oracle(step) for step in steps]
    points = (history.steps if key in OF_SAMPLES else history.evaluations).points(key)
    assert [value for _, value in points] == pytest.approx(
        [math.nan if one is None else one for one in expected], nan_ok=True
    )
    (chart,) = [one for one in run_charts([history]) if one.title == title]
    (line,) = [one for one in chart.lines if one.label == label]
    assert sum(len(part.split()) for part in line.stretches) == sum(one is not None for one in expected)


def scraped(registry):
    return {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}


@pytest.mark.parametrize("name", [name for name, (key, _) in GAUGES.items() if key in OF_SAMPLES])
def test_gauge_equals_metric_of_last_step_and_is_nan_where_undefined(name, lines):
    registry = CollectorRegistry()
    log, oracle, shown = MeteredLog(SilentLog(), registry), OF_SAMPLES[GAUGES[name][0]], []
    for line in lines[0::2]:
        log.write("step", line)
        shown.append(scraped(registry)[name])
    expected = [math.nan if (value := oracle(step)) is None else value for step in RUN]
    assert shown == pytest.approx(expected, nan_ok=True)


def test_token_counter_is_sum_over_run(lines):
    registry = CollectorRegistry()
    log = MeteredLog(SilentLog(), registry)
    for line in lines[0::2]:
        log.write("step", line)
    tokens = sum(OF_SAMPLES["rollout/gen_new_tokens_total"](step) for step in RUN)
    assert scraped(registry)["stage2_rollout_tokens_total"] == tokens > 0


OF_GRPO = {REWARD, SPREAD, f"eval_{REWARD}", "completions/mean_length"}


def test_every_shown_metric_is_documented():
    """All keys of the log have one: `test_every_logged_metric_has_oracle`."""
    shown = {key for figure in _FIGURES for _, key in figure.lines} | {key for _, key, _ in _STEP_COLUMNS}
    shown |= {f"eval_rollout_{name}" for name in _EVALUATION_COLUMNS}
    shown |= {key for key, _ in (*GAUGES.values(), *COUNTERS.values())}
    page = PAGE.read_text(encoding="utf-8")
    assert {key for key in shown - OF_GRPO if f"\n| `{key}` |" not in page} == set()
