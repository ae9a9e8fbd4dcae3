"""Rollouts for several optimizer steps: every sample as often as it should be, and nothing kept is ever changed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from stage2_trainer.data.records import Record
from stage2_trainer.learner.rows import PackedRowPlanner, RowGroup, SingleRowPlanner, WindowRowPlanner
from stage2_trainer.learner.step import CurrentStep, KeptRows
from stage2_trainer.packing import PackingError
from stage2_trainer.telemetry.timeline import Stopwatch
from tests.unit.trainer.learner.harness import box, build, record, shifted


def test_reusing_rollouts_for_other_records_raises_error():
    current = CurrentStep(None, SingleRowPlanner())
    current.set_batches([[Record(1, "a", (), 8, 8)]], global_step=5, uses=3)
    current._kept.groups = [RowGroup(0, [], {}, [])]
    for place, name in [(2, "a"), (1, "b")]:
        with pytest.raises(
            RuntimeError, match="step 6: these records differ from those whose rollouts were kept at step 5"
        ):
            current.set_batches([[Record(place, name, (), 8, 8)]], global_step=6, uses=3)


@pytest.mark.parametrize(("step", "served"), [(4, False), (5, False), (6, True), (7, True), (8, False), (9, False)])
def test_kept_rows_serve_only_agreed_number_of_following_steps(step, served):
    assert KeptRows(5, 3, [], [RowGroup(0, [], {}, [])]).serves(step) is served
    assert not KeptRows(5, 3, []).serves(step), "their own step was not finished"


class Piece(list):
    """A segment as long as it is."""

    stats = None


def test_checkpoint_within_step_keeps_segments_that_waited_before_step():
    """The resumed run makes the rollouts of that step again."""
    before, new = Piece([1] * 6), Piece([1] * 7)
    answers = SimpleNamespace(micro_steps=lambda: [[new]], stopwatch=Stopwatch(), report=None)
    planner = PackedRowPlanner(10, capacity=8, min_fill=0.1)
    planner.wait([before])
    current = CurrentStep(SimpleNamespace(sync_and_request=lambda *_, **__: answers), planner)
    current.set_batches([[Record(1, "a", (), 8, 8)]], global_step=3, uses=1)
    (group,) = current.rows(Stopwatch())
    assert group.rows == [(before,)]
    assert list(current.waiting(3)) == [before]
    assert list(current.waiting(4)) == [new]


def test_growing_packing_buffer_is_warned_about_once_before_error(caplog):
    """A valid configuration ended at step 81 with exit code 64, and nothing had warned of it."""
    planner = PackedRowPlanner(10, capacity=8, min_fill=0.1)
    warned = []
    for _ in range(7):
        planner.plan([[Piece([1] * 6), Piece([1] * 6)]])
        warned.append(len(caplog.records))
    assert warned == [0, 0, 0, 0, 1, 1, 1]
    assert "training.packing_buffer: 5 segments wait for a row, and 8 may" in caplog.text
    assert "training.per_device_train_batch_size" in caplog.text
    planner.plan([[Piece([1] * 6)]])
    with pytest.raises(PackingError):
        planner.plan([[Piece([1] * 6), Piece([1] * 6)]])


@pytest.fixture
def records(image_paths):
    return [
        record(
            image_paths[i % 3], i, object_1=box("red box", 100, 100, 400 + i, 400), object_2=box("ball", 5, 5, 9 + i, 9)
        )
        for i in range(5)
    ]


@pytest.fixture
def make(make):
    options = {"answer": shifted, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": -1}
    return lambda **changes: make(**{**options, "num_train_epochs": 1, **changes})


def trained_on(harness):
    """Count how often each record's tokens were trained on, by watching the micro-steps that are taken."""
    seen = Counter()
    lay_out = harness.learner.passes.lay_out

    def watch(group):
        seen.update(tuple(segment.placed.encoding.input_ids.tolist()) for row in group.rows for segment in row)
        return lay_out(group)

    harness.learner.passes.lay_out = watch
    return seen


def test_each_window_is_generated_once_and_trained_on_m_times(make):
    harness = make(m_steps=2)
    seen = trained_on(harness)
    harness.train()
    # 5 records, windows of 2: two full ones, each for two steps, and a partial one
    assert harness.sync.versions == [0, 2, 4]
    assert sorted(seen.values()) == [1, 2, 2, 2, 2]
    steps = harness.lines("step")
    assert [step["rollout/buffer_reuse"] for step in steps] == [0, 1, 0, 1, 0]
    assert [step["rollout/buffer_window_step0"] for step in steps] == [0, 0, 2, 2, 4]
    assert [step["rollout/buffer_completed_steps"] for step in steps] == [0, 1, 0, 1, 0]
    for what in ("rollout_generate", "rollout_parse_match", "rollout_teacher_encode"):
        assert [step[f"time/{what}_s"] > 0 for step in steps] == [True, False, True, False, True], what
    assert [step["sync/version"] for step in steps] == [0, 0, 2, 2, 4]
    assert [step["sync/bytes"] for step in steps] == [10, 0, 10, 0, 10], "what a step has pushed itself"


def test_single_step_per_window_logs_no_reuse_metrics(make):
    lines = make(m_steps=1).train()
    assert ["rollout/buffer_reuse" in one for one in lines if one["event"] == "step"] == [False] * 3


def test_run_resumed_within_window_generates_its_rollouts_again(make, tmp_path):
    make(m_steps=2, max_steps=3, save_strategy="steps", save_steps=3).learner.train()
    again = make(m_steps=2, max_steps=5)
    again.learner.train(tmp_path / "checkpoint-3")
    assert again.sync.versions == [3, 4]
    assert [step["step"] for step in again.lines("step")] == [1, 2, 3, 4, 5]


def rows_of_windows():
    return WindowRowPlanner(600, window=2, partial=PackedRowPlanner(600, capacity=8, min_fill=0.1))


@pytest.mark.parametrize(("m_steps", "stop"), [(1, 1), (2, 1), (2, 4)])
def test_epoch_split_by_resume_trains_each_sample_as_often_as_without(make, tmp_path, m_steps, stop):
    last = 2 * m_steps + 1  # two full windows and a partial one
    seen = []
    for steps_of_run, checkpoint in ((stop, None), (last, tmp_path / f"checkpoint-{stop}")):
        run = make(rows=rows_of_windows(), m_steps=m_steps, max_steps=steps_of_run,
                   save_strategy="steps", save_steps=stop)  # fmt: skip
        seen.append(trained_on(run))
        run.learner.train(checkpoint)
    steps = run.lines("step")
    assert [step["step"] for step in steps] == list(range(1, last + 1))
    assert [step["packing/post_rollout_scope_window"] for step in steps] == [1] * (last - 1) + [0]
    assert sorted(sum(seen, Counter()).values()) == [1] + [m_steps] * 4


@pytest.mark.parametrize(("m_steps", "stop", "last"), [(1, 1, 3), (2, 1, 5), (2, 2, 5)])
def test_resumed_run_trains_on_segments_waiting_for_row(tmp_path, model, encoder, records, m_steps, stop, last):
    """Rows hold one sample, micro-steps bring two: more and more wait."""

    def trained(folder, max_steps, checkpoint=None):
        rows = PackedRowPlanner(125, capacity=8, min_fill=0.1)
        saving = {"save_strategy": "steps", "save_steps": stop}
        run = build(folder, model, encoder, records, answer=shifted, rows=rows, m_steps=m_steps, max_steps=max_steps,
                    per_device_train_batch_size=2, gradient_accumulation_steps=1, **saving)  # fmt: skip
        seen = trained_on(run)
        run.learner.train(checkpoint)
        return seen

    whole = trained(tmp_path / "whole", last)
    parts = trained(tmp_path / "parts", stop)
    parts += trained(tmp_path / "parts", last, tmp_path / "parts" / f"checkpoint-{stop}")
    assert parts == whole


def test_second_step_on_same_rollouts_lowers_loss(make):
    lines = make(m_steps=2, max_steps=2, learning_rate=1e-4).train()
    first, second = [one for one in lines if one["event"] == "step"]
    assert second["loss"] < first["loss"]
