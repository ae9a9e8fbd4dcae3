"""The timeline of a run of tests: real processes, and a picture of what was measured."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.timeline import Tier, Timeline, busy_share, draw, measure, read, tier_of, write

COMPUTES = "import time\nwhile time.process_time() < 3: pass"


def test_tier_counts_only_cpu_time_of_its_own_processes(tmp_path: Path) -> None:
    script, python = tmp_path / "both", f"'{sys.executable}' -c '{COMPUTES}'"
    script.write_text(f"{python} -m tests.support.mutants & {python}; wait")
    timeline, code = measure(["sh", str(script)], tmp_path / "costs")
    assert code == 0
    assert list(timeline.tiers) == ["mutants"]
    assert 1.5 < timeline.tiers["mutants"].cpu_s < 4.5
    assert timeline.wall_s > 3
    assert max(timeline.busy) > 0.5 or os.nice(0) > 0, "work of low priority is not counted"


def test_work_of_low_priority_does_not_count_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = SimpleNamespace(user=30.0, nice=50.0, system=5.0, irq=0.0, softirq=1.0, idle=14.0)
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda: shares)
    assert busy_share() == pytest.approx(0.36)


def test_exit_code_of_failed_run_is_kept(tmp_path: Path) -> None:
    assert measure(["sh", "-c", "exit 3"], tmp_path / "costs")[1] == 3


@pytest.mark.parametrize(
    ("command", "tier"),
    [
        ("python -m tests.support.once_more jobs -q tests/jobs", "jobs"),
        ("/x/bin/pytest -q --durations=10 -n 2 --dist loadfile tests/unit", "unit"),
        ("python -m pytest -m alone tests/cluster", None),
    ],
)
def test_process_is_assigned_to_tier_by_its_command(command: str, tier: str | None) -> None:
    assert tier_of(command.split()) == tier


def test_table_and_picture_show_measurements(tmp_path: Path) -> None:
    timeline = Timeline(2, 120.0, [1.0, 0.5], {"unit": Tier(0.0, 90.0, 80.0)})
    assert list(timeline.table())[2:] == [
        "| unit | 0:00 | 1:30 | 80 |",
        "| all | 0:00 | 2:00 | 180 |",
        "\nOf 2 cores 25% of the time were idle.",
    ]
    write(timeline, tmp_path / "timeline.json")
    assert read(tmp_path / "timeline.json") == timeline
    draw(timeline, tmp_path / "timeline.svg")
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
