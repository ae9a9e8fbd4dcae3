"""The six alerts by Prometheus' own rules: each fires when it has to, stays silent beside it, and says what to do."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.unit.charts.conftest import Template
from tests.unit.charts.test_chart import figures_in, figures_of_the_controller

OF_A = 'pod="a", job="stage2-metrics"'
OF_A_LEARNER = 'namespace="tenant", pod="a", job="stage2-system/stage2-learners"'
"""What the chart's PodMonitor gives the series of a learner, its author's own program, whatever it writes itself."""


class Case(NamedTuple):
    """Series from minute 0 on, in Prometheus' notation, and the labels with which the alert fires at a minute."""

    alert: str
    series: Mapping[str, str]
    minute: int
    fires: Mapping[str, str] | None


def leader(namespace: str) -> str:
    return f'stage2_leader{{namespace="{namespace}", {OF_A}}}'


def phase(name: str, phase: str) -> str:
    return f'stage2_job_phase{{namespace="t", name="{name}", phase="{phase}", {OF_A}}}'


def step(name: str) -> str:
    return f'stage2_job_step{{namespace="t", name="{name}", {OF_A}}}'


def unreachable(name: str) -> str:
    return f'stage2_job_learner_unreachable{{namespace="t", name="{name}", {OF_A}}}'


RELEASE = {"namespace": "stage2-system"}
POD = {**RELEASE, "pod": "a"}
JOB = {"namespace": "t", "name": "j"}
PASSES = f'stage2_reconcile_total{{namespace="stage2-system", result="error", {OF_A}}}'
AGE = f'stage2_watch_compared_age_seconds{{namespace="stage2-system", {OF_A}}}'
LATE_IN_ALL = f'stage2_event_loop_lag_seconds_sum{{namespace="stage2-system", {OF_A}}}'


def late(by: str) -> str:
    return f'stage2_event_loop_lag_seconds_bucket{{namespace="stage2-system", le="{by}", {OF_A}}}'


def of_learner(figure: str, labels: str = "") -> str:
    return f"{figure}{{{OF_A_LEARNER}{labels}}}"


CASES = [
    Case("Stage2NoLeader", {leader("stage2-system"): "0x20"}, 6, RELEASE),
    Case("Stage2NoLeader", {leader("another"): "1x20"}, 6, RELEASE),
    Case("Stage2NoLeader", {leader("stage2-system"): "1x3 0x3 1x14"}, 20, None),
    Case("Stage2WatchesStale", {AGE: "0+60x20"}, 9, POD),
    Case("Stage2WatchesStale", {AGE: "120x20"}, 20, None),
    Case("Stage2LoopStands", {late("+Inf"): "0+1200x40", late("0.1"): "0+1190x40"}, 30, POD),
    Case("Stage2LoopStands", {late("+Inf"): "0+1200x40", late("0.1"): "0+1199x40"}, 30, None),
    Case("Stage2LoopStands", {LATE_IN_ALL: "0+7x40"}, 30, POD),
    Case("Stage2LoopStands", {LATE_IN_ALL: "0+5x40"}, 30, None),
    Case("Stage2ControllerBug", {PASSES: "0x10 1x10"}, 12, POD),
    Case("Stage2ControllerBug", {PASSES: "7x40"}, 40, None),
    Case("Stage2JobFailed", {phase("j", "Failed"): "1x20"}, 1, JOB),
    Case("Stage2JobFailed", {phase("j", "Succeeded"): "1x20"}, 20, None),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x120", step("j"): "0+1x20 20x100"}, 82, JOB),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x120", step("j"): "0+1x20 20x100"}, 78, None),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x120"}, 61, JOB),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x120", step("j"): "0x120"}, 59, None),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x40 _x9 1x90"}, 108, None),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x40 _x9 1x90"}, 112, JOB),
    Case("Stage2JobStalled", {phase("j", "Running"): "1x120", step("j"): "0x29 1x29 2x29 3x29"}, 110, None),
    Case("Stage2JobStalled", {phase("j", "Succeeded"): "1x120", step("j"): "20x120"}, 110, None),
    Case("Stage2LearnerUnreachable", {unreachable("j"): "1x20"}, 6, JOB),
    Case("Stage2LearnerUnreachable", {unreachable("j"): "1x4 0x20"}, 10, None),
]
OTHERS_JOB = ', exported_namespace="t", name="j"'
FORGED = [
    Case("Stage2NoLeader", {of_learner("stage2_leader", ', exported_namespace="stage2-system"'): "1x20"}, 6, RELEASE),
    Case("Stage2WatchesStale", {of_learner("stage2_watch_compared_age_seconds"): "999x20"}, 10, None),
    Case("Stage2LoopStands", {of_learner("stage2_event_loop_lag_seconds_sum"): "0+7x40"}, 30, None),
    Case(
        "Stage2LoopStands",
        {of_learner("stage2_event_loop_lag_seconds_bucket", ', le="+Inf"'): "0+1200x40"}
        | {of_learner("stage2_event_loop_lag_seconds_bucket", ', le="0.1"'): "0x40"},
        30,
        None,
    ),
    Case("Stage2ControllerBug", {of_learner("stage2_reconcile_total", ', result="error"'): "0x10 1x10"}, 12, None),
    Case("Stage2JobFailed", {of_learner("stage2_job_phase", f'{OTHERS_JOB}, phase="Failed"'): "1x20"}, 10, None),
    Case("Stage2LearnerUnreachable", {of_learner("stage2_job_learner_unreachable", OTHERS_JOB): "1x20"}, 10, None),
    Case("Stage2JobStalled", {of_learner("stage2_job_phase", f'{OTHERS_JOB}, phase="Running"'): "1x120"}, 90, None),
    Case(
        "Stage2JobStalled",
        {f'stage2_job_phase{{namespace="tenant", name="j", phase="Running", {OF_A}}}': "1x120"}
        | {of_learner("stage2_job_step", ', name="j"'): "0+1x120"},
        90,
        {"namespace": "tenant", "name": "j"},
    ),
]
"""What a learner can write where it is scraped too: it neither raises an alert nor silences one."""


@pytest.fixture(scope="module")
def rules(template: Template) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = template("metrics.prometheusRule.enabled=true")["PrometheusRule", "stage2"]["spec"]
    return spec


def test_each_alert_fires_when_it_has_to_and_only_then(rules: Mapping[str, Any], promtool: str, tmp_path: Path) -> None:
    _run(CASES, rules, promtool, tmp_path)


def test_no_learner_raises_or_silences_an_alert(rules: Mapping[str, Any], promtool: str, tmp_path: Path) -> None:
    """A learner is its author's own program, and the chart's PodMonitor has it scraped."""
    _run(FORGED, rules, promtool, tmp_path)


def _run(cases: Sequence[Case], rules: Mapping[str, Any], promtool: str, tmp_path: Path) -> None:
    """All cases in one run of promtool."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests = [_test(case, _rule(rules, case.alert)) for case in cases]
    text = yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    (tmp_path / "tests.yaml").write_text(text)
    command = [promtool, "test", "rules", "tests.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(rules: Mapping[str, Any]) -> None:
    alerts = {rule["alert"] for rule in rules["groups"][0]["rules"]}
    assert len(alerts) == 7
    for fires in (True, False):
        assert {case.alert for case in CASES if (case.fires is not None) is fires} == alerts
    assert {case.alert for case in FORGED} == alerts


def test_alerts_ask_only_for_figures_that_the_controller_has(rules: Mapping[str, Any]) -> None:
    asked = figures_in(rule["expr"] for rule in rules["groups"][0]["rules"])
    assert asked
    assert asked <= figures_of_the_controller()


def _rule(rules: Mapping[str, Any], alert: str) -> Mapping[str, Any]:
    (found,) = [rule for rule in rules["groups"][0]["rules"] if rule["alert"] == alert]
    return dict(found)


def _test(case: Case, rule: Mapping[str, Any]) -> dict[str, Any]:
    fires = []
    if case.fires:
        fires = [{"exp_labels": {**case.fires, **rule["labels"]}, "exp_annotations": _filled(rule, case)}]
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [{"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": fires}],
    }


def _filled(rule: Mapping[str, Any], case: Case) -> dict[str, str]:
    """Return the annotations with their labels filled in, as Prometheus fills them in."""
    reported = {
        key: text.replace("{{ $value | humanizeDuration }}", "9m 0s") for key, text in rule["annotations"].items()
    }
    for label, value in (case.fires or {}).items():
        reported = {key: text.replace(f"{{{{ $labels.{label} }}}}", value) for key, text in reported.items()}
    return reported
