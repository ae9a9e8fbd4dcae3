"""Where a step's wall time went: the parts add up, waiting is not counted as work, and the trace can be read back."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from stage2_trainer.model.transformers_compat import disable_cache
from stage2_trainer.telemetry.timeline import PART_OF, PARTS, TIMELINE, StepTime, Timeline, TraceFile, step_time
from tests.unit.trainer.learner.harness import box, build, record


def parts(time_of_step):
    return {name: value for name, value in time_of_step.parts.items() if value}


def test_waiting_time_is_attributed_to_awaited_phase():
    training = [("wait", 0, 10), ("sync", 0, 1), ("rollout_generate", 1, 6), ("backward", 10, 16), ("forward", 10, 12)]
    beside = [("rollout_teacher_encode", 2, 4), ("rollout_teacher_encode", 5, 7), ("rollout_parse_match", 7, 8)]
    requests = {"a": [(1, 5), (1, 3)], "b": [(2, 4)], "c": []}
    found = step_time((0, 20), training, beside, requests)
    assert parts(found) == {
        "sync": 1, "generate": 4, "encode": 2, "match": 1, "wait": 2, "forward": 2, "backward": 4, "other": 4,
    }  # fmt: skip
    assert [(one.server, one.busy_share, one.in_flight) for one in found.servers] == [
        ("a", 0.2, 0.3), ("b", 0.1, 0.1), ("c", 0, 0),
    ]  # fmt: skip
    assert found.figures()["step/learner_idle_share"] == pytest.approx(1 - 6 / 20)


def test_learner_that_generates_itself_has_no_waiting_time():
    assert parts(step_time((0, 4), [("rollout_generate", 0, 3)], [], {})) == {"generate": 3, "other": 1}


def test_step_parts_add_up_for_any_nested_spans():
    draws = random.Random(5)

    def nested(start, end, depth):
        found = [(draws.choice([*PART_OF, "save"]), start, end)]
        cuts = sorted(draws.uniform(start, end) for _ in range(4))
        return found + [span for a, b in (cuts[:2], cuts[2:]) for span in (nested(a, b, depth - 1) if depth else [])]

    for _ in range(50):
        spans = nested(-1.0, 5.0, 3) + nested(6.0, 12.0, 2)
        requests = {"a": [tuple(sorted((draws.uniform(-2, 12), draws.uniform(-2, 12)))) for _ in range(5)]}
        found = step_time((0.0, 10.0), spans, nested(0.0, 9.0, 3), requests)
        assert sum(found.parts.values()) == pytest.approx(10.0)
        assert min(found.parts.values()) >= 0


def test_step_parts_of_joined_processes_add_up():
    one = step_time((0, 10), [("forward", 0, 10)], [], {"a": [(0, 5)]})
    two = step_time((0, 20), [("sync", 0, 20)], [], {"a": []})
    joined = StepTime.joined([one, two])
    assert (joined.wall, joined.parts["forward"], joined.parts["sync"]) == (15, 5, 10)
    assert [(server.busy_share, server.in_flight) for server in joined.servers] == [(0.5, 0.5)]


def test_request_that_outlasts_step_counts_in_both_steps():
    timeline, asked, answered = Timeline(), threading.Event(), threading.Event()
    timeline.set_servers(["a", "idle"])

    def ask():
        with timeline.request("a"):
            asked.set()
            answered.wait()

    def most_of_the_step(start):
        time.sleep(2 * (time.monotonic() - start))  # by the clock: twice as long as it took so far

    start = time.monotonic()
    timeline.begin()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    asked.wait()
    most_of_the_step(start)
    first = timeline.end(1)
    start = time.monotonic()
    timeline.begin()
    answered.set()
    thread.join()
    most_of_the_step(start)
    second = timeline.end(2)
    shares = {one.server: one.busy_share for one in first.servers}
    assert shares["a"] > 0.5 > shares["idle"] == 0
    assert second.servers[0].busy_share < 0.5


def test_step_reports_cpu_time_and_wall_time():
    timeline = Timeline()
    timeline.begin()
    time.sleep(0.3)  # by the clock: seconds in which it does not compute
    end = time.process_time() + 0.1  # by the clock: seconds in which it computes
    while time.process_time() < end:
        pass
    found = timeline.end(1)
    assert 0.1 <= found.cpu < found.wall - 0.2
    other = StepTime(1.0, dict.fromkeys(PARTS, 0.0), cpu=0.5)
    joined = StepTime.joined([other, StepTime(1.0, dict.fromkeys(PARTS, 0.0), cpu=1.5)])
    assert joined.figures()["step/cpu_s"] == 1.0


def events_of(path):
    text = path.read_text()
    return json.loads(text if text.endswith("]\n") else text.rstrip().rstrip(",") + "]")


@pytest.fixture
def traced(tmp_path, model, encoder, image_paths):
    """The trace of three optimizer steps, and their records."""
    disable_cache(model)
    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]
    TIMELINE.trace = trace = TraceFile(tmp_path / "trace.json", process="learner 0")
    try:
        build(tmp_path, model, encoder, records, max_steps=3).learner.train()
    finally:
        TIMELINE.trace = None
        trace.close()
    lines = map(json.loads, (tmp_path / "stage2_log.jsonl").read_text().splitlines())
    return events_of(tmp_path / "trace.json"), [line for line in lines if line["event"] == "step"]


def test_trace_slices_are_nested_and_match_logged_step_times(traced):
    events, steps = traced
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"MainThread"} < set(names.values())
    tracks = {
        name: [
            (e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X" and e["tid"] == t
        ]
        for t, name in names.items()
    }
    for slices in tracks.values():
        for one in slices:
            for other in slices:
                within = one[1] >= other[1] - 1e-6 and one[2] <= other[2] + 1e-6
                around = other[1] >= one[1] - 1e-6 and other[2] <= one[2] + 1e-6
                assert within or around or one[2] <= other[1] + 1e-6 or other[2] <= one[1] + 1e-6, (one, other)
    main = tracks["MainThread"]
    assert [name for name, _, _ in main if name.startswith("step ")] == ["step 1", "step 2", "step 3"]
    for step in steps:
        (window,) = [(start, end) for name, start, end in main if name == f"step {step['step']}"]
        assert window[1] - window[0] == pytest.approx(step["step/wall_s"], abs=1e-5)
        assert sum(step[f"step/{part}_s"] for part in PARTS) == pytest.approx(step["step/wall_s"])
        traced_parts = step_time(window, [one for one in main if not one[0].startswith("step ")], [], {}).parts
        for part in ("forward", "backward", "optimizer", "sync", "pack"):
            assert traced_parts[part] == pytest.approx(step[f"step/{part}_s"], abs=1e-4)
        assert step["step/forward_s"] > 0 < step["step/backward_s"]


def test_requests_of_server_share_trace_track(tmp_path):
    trace = TraceFile(tmp_path / "trace.json", process="learner 0")
    trace.request("http://a", 1, (1.0, 3.0))
    trace.request("http://a", 2, (2.0, 4.0))
    trace.close()
    slices = [event for event in events_of(tmp_path / "trace.json") if event.get("cat") == "rollout"]
    assert len({(one["pid"], one["tid"], one["name"]) for one in slices}) == 1
    assert [(one["ph"], one["id"]) for one in slices] == [("b", 1), ("e", 1), ("b", 2), ("e", 2)]


def test_trace_is_bounded_and_readable_while_written(tmp_path):
    trace = TraceFile(tmp_path / "trace.json", process="learner 0", most=10)
    for _ in range(100):
        trace.span("MainThread", ("forward", 0.0, 1.0))
    trace.flush()
    written = events_of(tmp_path / "trace.json")
    assert len(written) == 10
    assert written[-1]["name"] == "the trace is full"
    trace.close()
    assert len(events_of(tmp_path / "trace.json")) == 11
