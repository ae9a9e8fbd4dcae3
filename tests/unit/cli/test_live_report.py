"""`stage2 report --live`: it follows a log that grows, ends as the run ends, keeps little and shows texts as texts."""

import io
import json
import os
import tracemalloc

import pytest
from rich.console import Console

from stage2_api.errors import ConfigError
from stage2_cli import log_tail
from stage2_cli.live_report.following import follow_run, followed_run
from stage2_cli.live_report.live_run import MOST_WARNINGS, RECENT, LiveRun
from stage2_cli.live_report.live_screen import duration, screen
from stage2_cli.log_tail import LogTail
from tests.unit.cli.reported import evaluation, step
from tests.unit.cli.test_light_start import HEAVY, stage2

HOSTILE = "\x1b[2J\x1b]0;owned\x07 [red]x[/red]\u202e\r"
START = {"event": "start", "step": 0, "max_steps": 10}
END = {"event": "end", "step": 3, "outcome": "done", "message": ""}
SERVER = {"server": "http://127.0.0.1:8000", "busy_share": 0.75, "in_flight": 4.5}


def line(record):
    return json.dumps(record) + "\n"


def timed(number, **figures):
    return step(number, **{"servers": [SERVER], "step/wall_s": 4.0, "step/generate_s": 3.0, **figures})


def warning(message):
    return {"event": "warning", "level": "WARNING", "logger": "stage2_trainer", "message": message}


class Writer:
    """Stands for the seconds between two looks: at each, the run writes its next piece."""

    def __init__(self, log, *pieces):
        self._log, self._pieces = log, list(pieces)

    def __call__(self, seconds):
        piece = self._pieces.pop(0)
        if isinstance(piece, type):
            raise piece
        with self._log.open("a", encoding="utf-8") as file:
            file.write(piece)


def followed(source, *pieces, terminal=False, log=None):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, height=60, color_system=None, highlight=False)
    follow_run(source, console=console, sleep=Writer(log or source / "stage2_log.jsonl", *pieces))
    return out.getvalue()


def drawn(*records):
    run = LiveRun("run")
    for record in records:
        run.note(line(record).encode())
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(screen(run, quiet_s=65.0))
    return out.getvalue()


def test_lines_follow_a_log_that_grows_until_the_run_has_ended(tmp_path):
    torn = line(timed(2))
    pieces = (
        line(START) + line(timed(1)),
        torn[:20],
        torn[20:] + line(evaluation(2)),
        "noise\n" + line(warning("a server is slow")) + line(END),
    )
    assert followed(tmp_path, *pieces).splitlines() == [
        f"{tmp_path.name}: starting, step 0",
        "training goes from step 0 to 10",
        "step 1: loss 2.000",
        "step 2: loss 1.000",
        "evaluation at step 2: F1 with class, IoU 0.5 0.500, F1 of training's matching 0.500, AP 0.500",
        "warning: a server is slow",
        "the run ended at step 3: done",
    ]


def test_a_run_that_has_ended_is_told_at_once(tmp_path):
    told = [START, *map(timed, range(1, 4)), {**END, "outcome": "failed", "message": "ServerError: lost"}]
    (tmp_path / "stage2_log.jsonl").write_text("".join(map(line, told)))
    assert followed(tmp_path).splitlines() == [
        f"{tmp_path.name}: ended, step 3 of 10, 4.00 s a step",
        "the run ended at step 3: failed: ServerError: lost",
    ]


def test_a_run_that_goes_on_after_its_end_is_followed_again(tmp_path):
    (tmp_path / "stage2_log.jsonl").write_text(line(START) + line(timed(3)) + line({**END, "outcome": "stopped"}))
    with (tmp_path / "stage2_log.jsonl").open("a") as file:
        file.write(line({**START, "step": 3}))
    said = followed(tmp_path, line(timed(4)), KeyboardInterrupt).splitlines()
    assert said[0].startswith(f"{tmp_path.name}: training, step 3 of 10")
    assert said[1:] == ["step 4: loss 0.500", "left: training, step 4 of 10, 4.00 s a step, 24 s left"]


def test_a_terminal_gets_a_view_that_is_drawn_anew(tmp_path):
    out = followed(tmp_path, line(START), line(timed(1)), line(END), terminal=True)
    places = [out.index(one) for one in ("starting, step 0", "training, step 0 of 10", "step 1 of 10, 4.00 s a step")]
    assert places == sorted(places)
    assert "the run ended at step 3: done" in out
    assert out.endswith("\x1b[?25h")  # the cursor is back


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path):
    out = followed(tmp_path, line(START) + line(timed(1)), KeyboardInterrupt, terminal=True)
    view, _, last = out.rpartition("\x1b[?25h")
    assert "last heard: step 1" in view
    assert last == "left: training, step 1 of 10, 4.00 s a step, 36 s left\n"


def test_the_view_shows_progress_scores_time_servers_and_warnings():
    scores = [evaluation(0, 0.75), evaluation(2, 0.5)]
    best = {"event": "best_checkpoint", "step": 0, "metric": "eval_rollout_f1_class_iou50", "score": 0.75}
    shown = drawn(START, timed(1), timed(2), *scores, best, warning("slow"))
    rows = [" ".join(one.strip("│ ").split()) for one in shown.splitlines()]
    assert "training, step 2 of 10, 4.00 s a step, 32 s left" in rows
    assert "last heard: the evaluation at step 2, 1 min 5 s ago" in rows
    assert "F1 with class, IoU 0.5 0.500 0.750 0" in rows
    assert "best checkpoint: step 0, eval_rollout_f1_class_iou50 0.750" in rows
    assert any(one.startswith("generate 75% ██") for one in rows)
    assert any(one.startswith("http://127.0.0.1:8000 75%") and one.endswith("4.5") for one in rows)
    assert "staleness, in steps: 1" in rows
    assert "warning: slow" in rows


def test_saved_output_of_a_learner_is_followed_with_its_warnings(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text(line(START))
    told = "2026-01-01 10:00:00,000 WARNING stage2_trainer.rollouts: too [slow]\n2026-01-01 10:00:00,000 INFO a: no\n"
    assert followed(log, told + line(END), log=log).splitlines()[1:] == [
        "warning: too [slow]",
        "the run ended at step 3: done",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_texts_of_a_log_can_do_nothing_to_a_terminal(tmp_path, terminal):
    told = [
        {"event": "reproducibility", "model": HOSTILE, "dataset": {"path": HOSTILE, "records": HOSTILE}},
        timed(1, servers=[{**SERVER, "server": HOSTILE}]),
        {"event": "best_checkpoint", "step": 1, "metric": HOSTILE, "score": 1.0},
        warning(HOSTILE),
        {**END, "outcome": HOSTILE, "message": HOSTILE},
    ]
    out = followed(tmp_path, "".join(map(line, told)), terminal=terminal)
    assert "\x1b[2J" not in out
    assert not {"\x07", "\u202e"} & set(out)
    assert "\\x1b[2J" in out
    assert "[red]x[/red]" in out


@pytest.mark.parametrize(
    "record",
    [
        {"event": "step"},
        {"event": "step", "step": "one", "loss": [], "servers": {"a": 1}, "step/wall_s": True},
        {"event": "step", "step": 10**30, "loss": float("nan"), "servers": [1, {}], "step/wall_s": 0.0},
        {"event": "evaluation", "step": None, "eval_rollout_f1": "high"},
        {"event": "reproducibility", "dataset": 3},
        {"event": ["step"]},
        {"event": "unheard of"},
        {"event": "end"},
    ],
)
def test_a_record_that_makes_no_sense_ends_nothing(record):
    assert "step 0" in drawn(record, evaluation(0))


def test_deep_and_huge_lines_are_passed_over():
    run = LiveRun("run")
    assert run.note(b'{"event": ' + b"[" * 100_000) is None
    assert run.note(b'{"event": "step", "step": ' + b"9" * 10_000 + b"}") is None


def test_little_is_kept_of_a_long_run(tmp_path):
    log, run = tmp_path / "log", LiveRun("run")
    sample = line({"event": "evaluation_sample", "step": 1, "text": "x" * 100_000})
    with log.open("w") as file:
        for number in range(1, 2001):
            file.write(line(timed(number)) + line(evaluation(number)) + line(warning(f"{number}")))
            file.write(sample if number % 10 == 0 else "")
    assert log.stat().st_size > 20_000_000
    tail = LogTail(log)
    tracemalloc.start()
    try:
        for one in tail.new_lines():
            run.note(one)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert (len(run.times), len(run.losses), len(run.warnings)) == (RECENT, RECENT, MOST_WARNINGS)
    assert run.step == 2000


def test_only_what_is_new_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"a\nb\nto")
    tail = LogTail(log)
    assert [*tail.new_lines()] == [b"a", b"b"]
    held = os.open(log, os.O_RDWR)
    os.pwrite(held, b"xx", 0)  # what was read is not looked at again
    os.lseek(held, 0, os.SEEK_END)
    os.write(held, b"rn\n\nc\n")
    os.close(held)
    assert [*tail.new_lines()] == [b"torn", b"", b"c"]
    assert [*tail.new_lines()] == []


def test_another_file_in_the_same_place_is_read_from_its_beginning(tmp_path):
    log, other = tmp_path / "log", tmp_path / "other"
    log.write_bytes(b"a\nto")
    tail = LogTail(log)
    assert [*tail.new_lines()] == [b"a"]
    other.write_bytes(b"a longer one\n")
    other.replace(log)
    assert [*tail.new_lines()] == [b"a longer one"]
    log.write_bytes(b"b\n")
    assert [*tail.new_lines()] == [b"b"]
    assert tail.times_begun == 2


def test_of_a_line_that_is_too_long_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(log_tail, "LONGEST", 10)
    monkeypatch.setattr(log_tail, "PIECE", 4)
    (tmp_path / "log").write_bytes(b"short\n" + b"x" * 40 + b"\nexactly 10\n" + b"y" * 30)
    tail = LogTail(tmp_path / "log")
    assert [*tail.new_lines()] == [b"short", b"exactly 10"]
    with (tmp_path / "log").open("ab") as file:
        file.write(b"y\nz\n")
    assert [*tail.new_lines()] == [b"z"]


@pytest.mark.parametrize(
    ("runs", "others", "told"),
    [("ab", {}, "2 runs"), ("a", {"html": "x.html"}, "--html"), ("a", {"watch": 3, "picture": None}, "--watch")],
)
def test_options_of_other_views_are_refused(runs, others, told):
    with pytest.raises(ConfigError, match=told):
        followed_run([*runs], **others)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (59.9, "59 s"), (3600, "1 h 0 min"), (90061, "1 d 1 h"), (1e7, "115 d 17 h")]
)
def test_times_are_told_in_their_two_largest_units(seconds, told):
    assert duration(seconds) == told


def test_the_command_shows_a_run_without_anything_heavy(tmp_path):
    (tmp_path / "stage2_log.jsonl").write_text(line(START) + line(timed(1)) + line(END))
    done, modules = stage2(tmp_path, "report", str(tmp_path), "--live")
    assert done.returncode == 0
    assert "the run ended at step 3: done" in done.stdout
    assert not modules & (HEAVY | {"matplotlib"})
    missing, _ = stage2(tmp_path, "report", str(tmp_path / "lost"), "--live")
    assert (missing.returncode, "must be a run's output folder" in missing.stderr) == (64, True)
