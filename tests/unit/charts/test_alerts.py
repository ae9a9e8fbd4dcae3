"""The alerts by Prometheus' own rules: each fires when it has to, stays silent beside it, and stands in the runbook."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.unit.charts.conftest import Template
from tests.unit.charts.test_dashboard import queried, series_of_the_controller

RUNBOOK = Path(__file__).parents[3] / "docs" / "runbook.md"

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


def of_job(figure: str, labels: str = "") -> str:
    return f'stage2_job_{figure}{{namespace="t", name="j", {OF_A}{labels}}}'


def phase(phase: str, reason: str = "") -> str:
    return of_job("phase", f', phase="{phase}", reason="{reason}"')


def problem(condition: str, reason: str) -> str:
    return of_job("problem", f', condition="{condition}", reason="{reason}"')


STEP, GPUS, SERVER_RESTARTS, RESTARTS = map(of_job, ("step", "gpus_held", "server_restarts", "restarts"))
EVICTIONS = of_job("evictions")
HALF_PLACED = problem("Placed", "HalfPlaced")
UNREACHABLE = problem("LearnerReachable", "LearnerUnreachable")


RELEASE = {"namespace": "stage2-system"}
POD = {**RELEASE, "pod": "a"}
JOB = {"namespace": "t", "name": "j"}
PASSES = f'stage2_reconcile_total{{namespace="stage2-system", result="error", {OF_A}}}'
AGE = f'stage2_watch_compared_age_seconds{{namespace="stage2-system", {OF_A}}}'
LATE_IN_ALL = f'stage2_event_loop_lag_seconds_sum{{namespace="stage2-system", {OF_A}}}'


def requests(code: str) -> str:
    return f'stage2_api_requests_total{{namespace="stage2-system", verb="get", code="{code}", {OF_A}}}'


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
    Case("Stage2JobFailed", {phase("Failed"): "1x20"}, 1, JOB),
    Case("Stage2JobFailed", {phase("Succeeded"): "1x20"}, 20, None),
    Case("Stage2JobStalled", {phase("Running"): "1x120", STEP: "0+1x20 20x100"}, 82, JOB),
    Case("Stage2JobStalled", {phase("Running"): "1x120", STEP: "0+1x20 20x100"}, 78, None),
    Case("Stage2JobStalled", {phase("Running"): "1x120"}, 61, JOB),
    Case("Stage2JobStalled", {phase("Running"): "1x120", STEP: "0x120"}, 59, None),
    Case("Stage2JobStalled", {phase("Running"): "1x40 _x9 1x90"}, 108, None),
    Case("Stage2JobStalled", {phase("Running"): "1x40 _x9 1x90"}, 112, JOB),
    Case("Stage2JobStalled", {phase("Running"): "1x120", STEP: "0x29 1x29 2x29 3x29"}, 110, None),
    Case("Stage2JobStalled", {phase("Succeeded"): "1x120", STEP: "20x120"}, 110, None),
    Case("Stage2LearnerUnreachable", {UNREACHABLE: "1x20"}, 6, JOB),
    Case("Stage2LearnerUnreachable", {UNREACHABLE: "1x4 stale"}, 10, None),
    Case("Stage2ApiErrors", {requests("200"): "0+10x40", requests("503"): "0+2x40"}, 20, POD),
    Case("Stage2ApiErrors", {requests("200"): "0+10x40", requests("0"): "0+2x40"}, 20, POD),
    Case("Stage2ApiErrors", {requests("200"): "0+10x40", requests("429"): "0+1x40"}, 20, None),
    Case(
        "Stage2ApiErrors", {requests("200"): "0+1x40", requests("404"): "0+9x40", requests("409"): "0+9x40"}, 20, None
    ),
    Case("Stage2JobStartsTooLong", {phase("Starting"): "1x40", GPUS: "4x40"}, 31, JOB),
    Case("Stage2JobStartsTooLong", {phase("Starting"): "1x40", GPUS: "4x40"}, 29, None),
    Case("Stage2JobStartsTooLong", {phase("Pending"): "1x40", GPUS: "1x40"}, 31, JOB),
    Case("Stage2JobStartsTooLong", {phase("Pending"): "1x90", GPUS: "0x90"}, 90, None),
    Case("Stage2JobStartsTooLong", {phase("Running"): "1x90", GPUS: "4x90"}, 90, None),
    Case(
        "Stage2JobStartsTooLong",
        {phase("Starting", "ServersLoading"): "1x15 stale", phase("Starting", "ServerCrashed"): "_x16 1x24"}
        | {GPUS: "4x40"},
        31,
        JOB,
    ),
    *(
        Case("Stage2JobStartsTooLong", {phase("Starting", reason): "1x40", GPUS: "4x40"}, 31, JOB)
        for reason in ("ImageUnavailable", "ContainersStarting", "ContainerConfigError", "WaitingForServers")
    ),
    *(
        Case("Stage2JobFailed", {phase("Failed", reason): "1x20"}, 1, JOB)
        for reason in ("StartDeadlineExceeded", "DeadlineExceeded", "EvictedTooOften")
    ),
    Case("Stage2JobEvicted", {phase("Pending"): "1x90", EVICTIONS: "0x9 1x80"}, 11, JOB),
    Case("Stage2JobEvicted", {phase("Running"): "1x90", EVICTIONS: "0x9 1x80"}, 60, JOB),
    Case("Stage2JobEvicted", {phase("Running"): "1x90", EVICTIONS: "0x9 1x80"}, 75, None),
    Case("Stage2JobEvicted", {phase("Running"): "1x90", EVICTIONS: "3x9 0x80"}, 30, None),
    Case("Stage2JobEvicted", {phase("Failed"): "1x90", EVICTIONS: "0x9 1x80"}, 11, None),
    *(
        Case("Stage2JobKeepsGpus", {phase(over): "1x40", GPUS: "4x40"}, 16, JOB)
        for over in ("Succeeded", "Failed", "Suspended")
    ),
    Case("Stage2JobKeepsGpus", {phase("Succeeded"): "1x40", GPUS: "4x9 0x30"}, 20, None),
    Case("Stage2JobKeepsGpus", {phase("Running"): "1x40", GPUS: "4x40"}, 40, None),
    Case("Stage2JobCrashLoops", {phase("Starting"): "1x60", SERVER_RESTARTS: "0x4 1x4 2x4 3x40"}, 20, JOB),
    Case("Stage2JobCrashLoops", {phase("Starting"): "1x60", SERVER_RESTARTS: "0x4 1x4 2x50"}, 20, None),
    Case("Stage2JobCrashLoops", {phase("Running"): "1x60", RESTARTS: "0x4 1x4 2x4 3x40"}, 20, JOB),
    Case("Stage2JobCrashLoops", {phase("Failed"): "1x60", RESTARTS: "0x4 1x4 2x4 3x40"}, 20, None),
    Case("Stage2JobCrashLoops", {phase("Running"): "1x240", RESTARTS: "0x59 1x59 2x59 3x59"}, 200, None),
    Case(
        "Stage2JobNotAccepted",
        {problem("Accepted", "NoLongerValid"): "1x20"},
        6,
        {**JOB, "reason": "NoLongerValid"},
    ),
    Case("Stage2JobNotAccepted", {problem("Accepted", "InvalidSpec"): "1x20"}, 6, {**JOB, "reason": "InvalidSpec"}),
    Case("Stage2JobNotAccepted", {problem("Accepted", "InvalidSpec"): "1x2 stale"}, 10, None),
    Case("Stage2JobNotAccepted", {problem("Accepted", "InternalError"): "1x20", HALF_PLACED: "1x20"}, 20, None),
    Case("Stage2JobNeverPlaced", {HALF_PLACED: "1x1 _x2 1x2 _x2 1x4 _x2 1x8 _x2 1x20"}, 25, JOB),
    Case("Stage2JobNeverPlaced", {problem("Placed", "NodeFull"): "1x30"}, 21, JOB),
    Case("Stage2JobNeverPlaced", {HALF_PLACED: "1x1 _x2 1x2 _x40"}, 20, None),
    Case("Stage2JobNeverPlaced", {problem("Placed", "NoSingleNodeFits"): "1x90"}, 90, None),
]
OTHERS_JOB = ', exported_namespace="t", name="j"'
OTHERS_PROBLEM = f'{OTHERS_JOB}, condition="Accepted", reason="InvalidSpec"'
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
    Case(
        "Stage2LearnerUnreachable",
        {of_learner("stage2_job_problem", f'{OTHERS_JOB}, condition="LearnerReachable"'): "1x20"},
        10,
        None,
    ),
    Case("Stage2ApiErrors", {of_learner("stage2_api_requests_total", ', code="503"'): "0+9x40"}, 20, None),
    Case(
        "Stage2JobStartsTooLong",
        {of_learner("stage2_job_phase", f'{OTHERS_JOB}, phase="Starting"'): "1x90"}
        | {of_learner("stage2_job_gpus_held", OTHERS_JOB): "4x90"},
        90,
        None,
    ),
    Case(
        "Stage2JobCrashLoops",
        {phase("Running"): "1x60", of_learner("stage2_job_restarts", OTHERS_JOB): "0+1x60"},
        20,
        None,
    ),
    Case(
        "Stage2JobEvicted",
        {phase("Running"): "1x60", of_learner("stage2_job_evictions", OTHERS_JOB): "0+1x60"},
        20,
        None,
    ),
    Case(
        "Stage2JobKeepsGpus",
        {phase("Succeeded"): "1x60", of_learner("stage2_job_gpus_held", OTHERS_JOB): "4x60"},
        40,
        None,
    ),
    Case("Stage2JobNotAccepted", {of_learner("stage2_job_problem", OTHERS_PROBLEM): "1x20"}, 10, None),
    Case(
        "Stage2JobNeverPlaced",
        {of_learner("stage2_job_problem", f'{OTHERS_JOB}, condition="Placed", reason="HalfPlaced"'): "1x60"},
        60,
        None,
    ),
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


def test_alerts_fire_only_in_their_case(rules: Mapping[str, Any], promtool: str, tmp_path: Path) -> None:
    _run(CASES, rules, promtool, tmp_path)


def test_learner_metrics_neither_raise_nor_silence_alert(
    rules: Mapping[str, Any], promtool: str, tmp_path: Path
) -> None:
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


def test_every_alert_has_firing_and_silent_case(rules: Mapping[str, Any]) -> None:
    alerts = {rule["alert"] for rule in rules["groups"][0]["rules"]}
    assert len(alerts) == 14
    for fires in (True, False):
        assert {case.alert for case in CASES if (case.fires is not None) is fires} == alerts
    assert {case.alert for case in FORGED} == alerts


def test_alerts_query_only_series_of_controller(rules: Mapping[str, Any]) -> None:
    exported = series_of_the_controller()
    for rule in rules["groups"][0]["rules"]:
        asked = queried(rule["expr"])
        assert asked
        for figure, labels in asked:
            assert labels <= exported[figure], rule["alert"]


def test_runbook_has_row_with_symptom_meaning_and_command_per_alert(rules: Mapping[str, Any]) -> None:
    _, _, section = RUNBOOK.read_text(encoding="utf-8").partition("\n## Alerts\n")
    lines = section.partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines if line.startswith("| `Stage2")]
    assert [row[0] for row in rows] == [f"| `{rule['alert']}`" for rule in rules["groups"][0]["rules"]]
    for rule, (_, symptom, meaning, command) in zip(rules["groups"][0]["rules"], rows, strict=True):
        assert symptom
        assert meaning
        assert re.search("`(kubectl|stage2|helm) [^`]+`", command), rule["alert"]
        assert rule["annotations"]["runbook"] == "docs/runbook.md#alerts"


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
