"""Values of an older release, as `helm upgrade --reuse-values` hands them on: without what a newer chart has added."""

import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.charts.conftest import CHART

PARTS = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
Values = dict[str, Any]
# What may be taken away by null: no other way drops an entry of the default.
MAY_BE_NONE = ("controller.resources", "metrics.dashboard.labels", "policy.largestJob")


def defaults() -> Values:
    values: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in PARTS:
        values["metrics"][part]["enabled"] = True
    return values


def paths(values: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def rendered(helm: str, folder: Path, values: Values) -> subprocess.CompletedProcess[str]:
    """Return what helm makes of a chart whose own values are these: --reuse-values does so."""
    chart = folder / "stage2"
    chart.mkdir(exist_ok=True)
    for part in CHART.iterdir():
        if part.name != "values.yaml" and not (chart / part.name).exists():
            (chart / part.name).symlink_to(part)
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    return subprocess.run([helm, "template", "stage2", str(chart)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(helm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return rendered(helm, tmp_path_factory.mktemp("whole"), defaults()).stdout


@pytest.mark.parametrize("path", [".".join(path) for path in paths(defaults())])
def test_a_value_that_is_missing_counts_as_its_default_or_is_named_with_the_way_out(
    helm: str, tmp_path: Path, whole: str, path: str
) -> None:
    values = deepcopy(defaults())
    *above, last = path.split(".")
    holder = values
    for key in above:
        holder = holder[key]
    del holder[last]
    done = rendered(helm, tmp_path, values)
    if done.returncode:
        assert f"{path}: the values lack it" in done.stderr or f"{path}." in done.stderr
        assert "use --reset-then-reuse-values instead of --reuse-values" in done.stderr
    else:
        assert done.stdout == whole or path.startswith(MAY_BE_NONE) or last == "enabled"  # by default it is false


@pytest.mark.parametrize("path", ["controller.resources", "metrics.dashboard.labels", "image.tag", "policy.largestJob"])
def test_a_default_may_be_taken_away_by_null(helm: str, tmp_path: Path, path: str) -> None:
    values = tmp_path / "values.yaml"
    *above, last = path.split(".")
    nested: Values = {last: None}
    for key in reversed(above):
        nested = {key: nested}
    values.write_text(yaml.safe_dump(nested))
    command = [helm, "template", "stage2", str(CHART), "--values", str(values), "--set=metrics.dashboard.enabled=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
