"""What a process is doing: who waits for it gets a line in time, with the parts that are done, and none too many."""

import threading
import time

import pytest

from stage2_trainer.process.activity import Activity

EVERY_S = 0.2


@pytest.fixture
def activity():
    return Activity(every_s=EVERY_S)


class Clock:
    """A clock that a test turns, for an activity whose listener looks at it often."""

    def __init__(self):
        self.now, self.looks = time.monotonic(), 0

    def monotonic(self):
        self.looks += 1
        return self.now

    def turn(self, by_s):
        """Let time pass, and wait until the listener has seen it."""
        self.now += by_s
        seen = self.looks + 3  # a look that is under way, and the line that it makes, may have seen the old time
        while self.looks < seen:
            time.sleep(0.01)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("stage2_trainer.process.activity.time", made)
    return made


def wait_for(lines, count, *, within_s=10.0):
    """Wait for so many lines that are not empty, and return them."""
    end = time.monotonic() + within_s
    while len(found := [line for line in lines if line]) < count and time.monotonic() < end:
        time.sleep(0.01)
    return found[:count]


def test_lasting_activity_is_reported_repeatedly_with_seconds(activity):
    lines = []
    start = time.monotonic()
    with activity.reported(lines.append), activity.doing("loading the model"):
        assert len(wait_for(lines, 3)) == 3
        assert time.monotonic() - start >= 3 * EVERY_S
    assert {line.rpartition(" (")[0] for line in lines if line} == {"loading the model"}
    assert all(line.endswith(" s)") for line in lines if line)


def test_activity_line_lists_nested_activities_with_progress(activity):
    with activity.doing("step 3 of 60"), activity.doing("generating", total=2000, unit="answers") as generating:
        assert activity.line() == "step 3 of 60; generating: 0 of 2,000 answers (0 s)"
        generating.advance()
        generating.advance(1500)
        assert activity.line() == "step 3 of 60; generating: 1,501 of 2,000 answers (0 s)"
        generating.what = "waiting for servers"
        assert "waiting for servers: 1,501 of" in activity.line()
    assert activity.line() == ""


def test_several_threads_advance_same_activity(activity):
    with activity.doing("scoring", total=4000) as scoring:
        threads = [threading.Thread(target=lambda: [scoring.advance() for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert activity.line() == "scoring: 4,000 of 4,000 (0 s)"


def test_activity_of_another_thread_is_reported_until_it_ends(activity):
    lines, ended = [], threading.Event()

    def work():
        with activity.doing("encoding"):
            ended.wait(10)

    thread = threading.Thread(target=work)
    with activity.reported(lines.append):
        thread.start()
        assert wait_for(lines, 1)[0].startswith("encoding")
        ended.set()
        thread.join()
        assert activity.line() == ""


def test_error_ends_activity(activity):
    with pytest.raises(OSError, match="lost"), activity.doing("reading"):
        raise OSError("lost")
    assert activity.line() == ""


def test_last_activity_line_is_cleared_once_when_activity_ends(activity):
    lines = []
    with activity.reported(lines.append):
        with activity.doing("loading"):
            wait_for(lines, 1)
        time.sleep(4 * EVERY_S)  # by the clock: nothing may happen; a slow machine can only miss the defect
        assert lines[-1] == ""
        assert lines.count("") == 1


def test_logged_step_postpones_activity_line_and_clears_last_one(activity, clock):
    lines = []
    with activity.reported(lines.append), activity.doing("step 1 of 2"):
        for _ in range(3):
            clock.turn(0.9 * EVERY_S)
            activity.said()
        assert lines == []
        clock.turn(1.1 * EVERY_S)
        assert len(wait_for(lines, 1)) == 1
        activity.said()
        assert lines[-1] == "", "the line is older than what was said"


def test_only_innermost_listener_gets_lines_and_first_may_come_at_once(activity, clock):
    outer, inner = [], []
    with activity.reported(outer.append), activity.doing("training"):
        with activity.reported(inner.append, first_s=0.0):
            assert len(wait_for(inner, 1)) == 1, "before any time has passed"
            clock.turn(1.1 * EVERY_S)
            assert len(wait_for(inner, 2)) == 2
        assert outer == []
        assert wait_for(outer, 1)


def test_failing_listener_is_called_again(activity):
    lines = []

    def closed(line):
        lines.append(line)
        raise BrokenPipeError

    with activity.reported(closed), activity.doing("exporting"):
        assert len(wait_for(lines, 2)) == 2


def test_control_characters_in_activity_name_are_escaped(activity):
    with activity.doing("reading \x1b[31m\n.jsonl"):
        assert activity.line() == "reading \\x1b[31m\\n.jsonl (0 s)"
