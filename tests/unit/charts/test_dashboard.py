"""The Grafana dashboard: its queries are such as Prometheus reads, and ask for the controller's own series alone."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stage2_controller.job.names import KIND
from stage2_controller.loop.metrics import Metrics
from stage2_controller.state.store import Store
from tests.unit.charts.conftest import Template
from tests.unit.controller import builders


def series_of_the_controller() -> dict[str, set[str]]:
    """The labels of each series that the controller exports, with those that a scrape adds."""
    status = {"phase": "Running", "step": 1, "maxSteps": 2, "loss": 0.5, "restarts": 0, "sync": {"seconds": 0.1}}
    times = {"startTime": "2026-01-02T03:04:05Z", "firstStepTime": "2026-01-02T03:05:05Z"}
    unreachable = {"type": "LearnerReachable", "status": "False", "reason": "LearnerUnreachable"}
    found = {**status, **times, "servers": [{"name": "server-0", "restarts": 0}], "conditions": [unreachable]}
    store = Store()
    store.put(KIND, {**builders.job(), "status": found})
    metrics = Metrics(store, lambda _: 1.0)
    metrics.requested("get", "secrets", 200)
    families = text_string_to_metric_families(metrics.text().decode())
    scraped = {"job", "pod", "namespace"}
    return {sample.name: {*sample.labels, *scraped} for family in families for sample in family.samples}


def queried(expression: str) -> list[tuple[str, set[str]]]:
    """The series that a query asks for, each with the labels by which it selects."""
    asked = re.findall(r"((?:stage2|process)_[a-z0-9_]+)(?:\{([^}]*)\})?", expression)
    return [(figure, set(re.findall(r'(\w+)\s*[=!]~?"', selector))) for figure, selector in asked]


@pytest.fixture(scope="module")
def dashboard(template: Template) -> dict[str, Any]:
    manifests = template("metrics.dashboard.enabled=true")
    return dict(json.loads(manifests["ConfigMap", "stage2-dashboard"]["data"]["stage2.json"]))


def queries(dashboard: dict[str, Any]) -> dict[str, str]:
    """The queries of all panels, by title and letter."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


def test_dashboard_queries_only_series_of_controller(dashboard: dict[str, Any]) -> None:
    exported = series_of_the_controller()
    for title, query in queries(dashboard).items():
        asked = queried(query)
        assert asked, title
        for figure, labels in asked:
            assert {"job"} <= labels <= exported[figure], title
        assert query.count('job="stage2-metrics"') == len(asked), f"{title}: a learner may write any series"


def test_dashboard_has_variables_for_namespace_and_job(dashboard: dict[str, Any]) -> None:
    variables = {one["name"]: one["query"] for one in dashboard["templating"]["list"]}
    assert [*variables] == ["datasource", "namespace", "job"]
    exported = series_of_the_controller()
    for name in ("namespace", "job"):
        form = re.fullmatch(r"label_values\((.*), (\w+)\)", variables[name])
        assert form
        ((figure, labels),) = queried(form[1])
        assert {form[2], *labels} <= exported[figure]
    for title, query in queries(dashboard).items():
        if "stage2_job_" in query:
            assert 'namespace=~"$namespace"' in query, title
            assert 'name=~"$job"' in query, title


def test_dashboard_queries_are_valid_promql(dashboard: dict[str, Any], promtool: str, tmp_path: Path) -> None:
    rules = [{"record": f"panel:{index}", "expr": query} for index, query in enumerate(queries(dashboard).values())]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    command = [promtool, "check", "rules", "--lint-fatal", "rules.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
