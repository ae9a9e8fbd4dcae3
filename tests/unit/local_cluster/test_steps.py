"""Long commands say what they do and how much there is of it, also where nobody sees a spinner."""

import io
import threading
import time

import pytest
from rich.console import Console

from local_cluster import steps
from local_cluster.steps import Steps


def test_step_outside_terminal_prints_numbered_line() -> None:
    printed = io.StringIO()
    made = Steps(Console(file=printed, width=20), 2)
    with made.step("building kubernetes from source"):
        pass
    with made.step("building [stage2/trainer:dev]", prints=True):
        pass
    assert printed.getvalue() == "1 of 2: building kubernetes from source\n2 of 2: building [stage2/trainer:dev]\n"


def test_long_step_prints_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AGAIN_S", 0.05)
    printed = io.StringIO()
    made = Steps(Console(file=printed), 1)
    with made.step("linking"):
        deadline = time.monotonic() + 30
        while printed.getvalue().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert printed.getvalue().splitlines()[1] == "1 of 1: linking: 0 s so far"


def test_failed_step_stops_its_reminders() -> None:
    printed, before = io.StringIO(), set(threading.enumerate())
    reminds: set[threading.Thread] = set()

    def fail() -> None:
        reminds.update(set(threading.enumerate()) - before)
        raise OSError

    with pytest.raises(OSError), Steps(Console(file=printed), 1).step("linking"):
        fail()
    assert reminds
    for thread in reminds:
        thread.join()
    assert printed.getvalue() == "1 of 1: linking\n"


def test_step_on_terminal_shows_numbered_spinner() -> None:
    printed = io.StringIO()
    with Steps(Console(file=printed, force_terminal=True), 3).step("linking"):
        pass
    assert "1 of 3: linking" in printed.getvalue()
