"""What each test costs is noted where a file is named: processor seconds of the processes that it started too."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.support import costs

BUSY = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_test_that_starts_busy_process_costs_its_seconds(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(f"""
        import subprocess, sys
        def test_busy():
            subprocess.run([sys.executable, "-c", {BUSY!r}], check=True)
        def test_idle():
            pass
    """)
    noted = pytester.path / "costs.jsonl"
    monkeypatch.setenv(costs.FILE, f"{noted}")
    pytester.runpytest_inprocess("-p", "tests.support.costs").assert_outcomes(passed=2)
    busy, idle = (json.loads(line) for line in noted.read_text().splitlines())
    assert busy["cpu_s"] >= 0.5 > idle["cpu_s"]
    assert "test_busy" in busy["test"]


def test_processor_seconds_of_process_include_child_that_still_runs() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{BUSY}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1)
    try:
        before = costs.cpu_seconds(psutil.Process())
        assert child.stdout is not None
        assert child.stdout.readline()
        assert costs.cpu_seconds(psutil.Process()) - before >= 0.45
    finally:
        child.communicate(b"\n")
