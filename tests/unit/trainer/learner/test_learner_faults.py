"""The table of the learner's faults: what each makes a run say, how the run ends, and that nothing is lost by it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from stage2_api.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_RETRYABLE
from stage2_trainer import main
from stage2_trainer.data.images import ImageError
from stage2_trainer.learner.listeners import rollout_document
from stage2_trainer.learner.rows import (
    PackedRowPlanner,
    SharedRowPlanner,
    SingleRowPlanner,
    StepRowPlanner,
    WindowRowPlanner,
)
from stage2_trainer.learner.step_record import SampleStats, StepRecord
from stage2_trainer.learner.supervise import OverlongRule
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.model.checkpoints import newest_whole
from stage2_trainer.packing import PackingError
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.bad_samples import FILE, BadSample, BadSamples
from stage2_trainer.rollouts.errors import BadStepError, TooManyBadSamples
from stage2_trainer.rollouts.first_process import ProcessExchange
from stage2_trainer.rollouts.replay import replay
from tests.support.ports import free_port
from tests.unit.trainer.learner.configs import run_config, write_box_records
from tests.unit.trainer.learner.harness import before_step, box, build, perfect, read_log, record
from tests.unit.trainer.learner.processes import join, run_members

pytestmark = pytest.mark.in_turns(2, apart=True)
ROW = 200
OK = 0


# --- images, by whole runs of `learn` whose answers are the model's own (hf) -----------------------------------------


def picture(folder: Path, name: str, side: int = 96) -> Path:
    path = folder / name
    pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.fromarray(pixels.numpy()).save(path)
    return path


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


class Run:
    """A run of `learn`: how it ended, its last message, and what it left."""

    def __init__(self, folder: Path, code: int):
        self.code = code
        self.last_words = json.loads((folder / "termination.json").read_text())["message"]
        self.events = [json.loads(line) for line in (folder / "out" / "stage2_log.jsonl").read_text().splitlines()]
        self.newest = newest_whole(folder / "out")

    def logged(self, event):
        return [one for one in self.events if one["event"] == event]


@pytest.fixture
def learn(tmp_path, model_path, termination_log):
    """A function that runs `learn` on records of these images, two to a step; the first of them is whole."""

    def run(images: Sequence[Path], *, objects=True, model=model_path, held_out=(), **training) -> Run:
        data = write_box_records(tmp_path / "train.jsonl", *images, boxes=int(objects))
        val = write_box_records(tmp_path / "val.jsonl", *(held_out or images[:1]), boxes=int(objects))
        config = run_config(
            matching={"rollout_backend": "hf", "max_new_tokens": 8, "rollout_generate_batch_size": 4},
            training={
                "output_dir": str(tmp_path / "out"), "max_steps": 4, "per_device_train_batch_size": 2, "save_steps": 1,
                "gradient_checkpointing": False, **training,
            },
            train_jsonl=data,
            model={"model": str(model), "torch_dtype": "float32", "attn_impl": "sdpa"},
            tuner={"train_type": "lora", "lora_rank": 2},
        )  # fmt: skip
        config = config.model_copy(update={"custom": config.custom.model_copy(
            update={"val_jsonl": val}
        )})  # fmt: skip
        return Run(tmp_path, main.learn(config))

    return run


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    return [picture(folder, name) for name in ("a.png", "b.png", "c.jpg", "d.png")]


@pytest.mark.parametrize(
    ("place", "spoil", "cause"),
    [(1, cut_off, "truncated"), (2, cut_off, "truncated"), (3, emptied, "it is empty")],
    ids=["a PNG that is cut off", "a JPEG that is cut off", "an empty file"],
)
def test_unreadable_image_sets_sample_aside_and_is_logged_by_file_name(learn, images, place, spoil, cause):
    spoil(images[place])
    run = learn(images)
    assert (run.code, run.last_words) == (OK, "")
    assert [step["bad_samples_total"] for step in run.logged("step")][-1] == 1
    for logged in run.logged("bad_sample"):
        assert logged["sample_id"] == f"train.jsonl:{place + 1}"
        assert logged["image"] == str(images[place])
        assert f"image {images[place]}: cannot be read" in logged["reason"]
        assert cause in logged["reason"]
        assert "base64" not in logged["reason"]
    assert len(run.logged("bad_sample")) == 2  # once an epoch
    assert [one["message"].partition(" (")[0] for one in run.logged("warning") if "set aside" in one["message"]] == [
        f"sample train.jsonl:{place + 1} is set aside"
    ] * 2
    assert run.logged("start") == [{"event": "start", "step": 0, "max_steps": 4, "processes": 1}]
    assert run.events[-1] == {"event": "end", "step": 4, "outcome": "done", "message": ""}
    assert run.newest.name == "checkpoint-4"


def test_image_deleted_during_start_sets_sample_aside(learn, images, monkeypatch):
    check = main.checked_records

    def checked_then_gone(*args, **kwargs):
        records = check(*args, **kwargs)
        images[2].unlink()
        return records

    monkeypatch.setattr(main, "checked_records", checked_then_gone)
    run = learn(images)
    assert run.code == OK
    assert {(logged["sample_id"], "No such file" in logged["reason"]) for logged in run.logged("bad_sample")} == {
        ("train.jsonl:3", True)
    }


def test_image_without_objects_is_trained_as_normal_sample(learn, images):
    run = learn(images, objects=False)
    assert run.code == OK
    assert run.logged("bad_sample") == []
    assert all(step["loss"] > 0 for step in run.logged("step"))


def test_unreadable_held_out_image_is_left_out_of_evaluation_metrics(learn, images, tmp_path):
    other = picture(tmp_path, "held-out.png")
    cut_off(other)
    run = learn(images, held_out=[images[0], other], eval_strategy="steps", eval_steps=4)
    assert run.code == OK
    assert [one["eval_bad_samples"] for one in run.logged("evaluation")] == [1, 1]
    assert [one["eval_rollout_gt_objects"] for one in run.logged("evaluation")] == [1, 1]
    assert {(logged["part"], logged["sample_id"]) for logged in run.logged("bad_sample")} == {
        ("held-out", "val.jsonl:2")
    }
    assert run.logged("step")[-1]["bad_samples_total"] == 0


def test_evaluation_of_only_bad_samples_stops_run(learn, images, tmp_path):
    other = picture(tmp_path, "held-out.png")
    cut_off(other)
    run = learn(images, held_out=[other], eval_strategy="steps", eval_steps=4)
    assert run.code == EXIT_RETRYABLE
    assert "all 1 held-out samples were set aside" in run.last_words


def test_too_many_bad_samples_stop_run_after_saving(learn, images):
    for one in images[2:]:
        cut_off(one)
    run = learn(images, max_bad_samples=1, per_device_train_batch_size=1, gradient_accumulation_steps=1, save_steps=50)
    assert run.code == EXIT_CONFIG
    assert run.last_words.startswith("training.max_bad_samples: 1; at most so many samples may be set aside, and 2")
    assert run.logged("bad_sample")[-1]["reason"] in run.last_words
    done = len(run.logged("step"))
    assert 1 <= done < 4
    assert run.newest.name == f"checkpoint-{done}"
    (noted,) = json.loads((run.newest / FILE).read_text())
    assert noted["sample_id"] == run.logged("bad_sample")[0]["sample_id"]


def test_resumed_run_continues_count_of_bad_samples(learn, images):
    for one in images[2:]:
        cut_off(one)
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    assert learn(images, max_bad_samples=1, **options).code == EXIT_CONFIG
    again = learn(images, max_bad_samples=1, **options)
    assert again.code == EXIT_CONFIG, "the first of them is not forgotten"
    raised = learn(images, max_bad_samples=2, **options)
    assert raised.code == OK
    assert [one["step"] for one in raised.logged("step")] == [1, 2, 3, 4]


def test_repeated_bad_sample_counts_for_step_that_met_it_first(tmp_path):
    samples = BadSamples(5, SimpleNamespace(write=lambda *_: None))
    for step in (1, 4):
        samples.note([BadSample("a", (), ValueError("cut off"))], step=step, of=2)
    samples.save(tmp_path, before=2)
    assert [one["step"] for one in json.loads((tmp_path / FILE).read_text())] == [1]


def test_first_bad_sample_stops_run_when_none_is_allowed(learn, images):
    cut_off(images[1])
    run = learn(images, max_bad_samples=0)
    assert run.code == EXIT_FAILURE
    assert f"image {images[1]}: cannot be read" in run.last_words
    assert run.newest is None or run.newest.name == f"checkpoint-{len(run.logged('step'))}"


# --- numbers that are none ------------------------------------------------------------------------------------------


def test_non_finite_gradient_stops_run_and_restart_resumes(learn, images, monkeypatch):
    make = main._make_run

    def broken(*args):
        learner = make(*args)
        trained = learner.engine.trained[0]
        before_step(learner, 2, lambda: trained.register_hook(lambda gradient: gradient * math.nan))
        return learner

    monkeypatch.setattr(main, "_make_run", broken)
    run = learn(images)
    assert run.code == EXIT_RETRYABLE
    assert run.last_words.startswith("step 3: the gradient norm is nan from micro-step 1 on (samples train.jsonl:")
    assert run.newest.name == "checkpoint-2"
    monkeypatch.setattr(main, "_make_run", make)
    again = learn(images)
    assert again.code == OK
    assert [one["step"] for one in again.logged("step")] == [1, 2, 3, 4]


# --- answers, by a learner whose answers are written down -----------------------------------------------------------


def endless(one):
    ghosts = [GTObject("ghost", "bbox", (900, 900, 901 + i, 901 + i)) for i in range(8)]
    return serialize_objects([*one.ground_truth.objects, *ghosts])


def huge_index(one):
    """Another description, so that the true object is missed, and appended with the next index."""
    answer = serialize_objects([GTObject("ghost", "bbox", (900, 900, 990, 990))])
    return answer.replace("object_1", "object_" + "9" * 900)


def huge_index_alone(one):
    return huge_index(one) if one.index == 1 else perfect(one)


def endless_alone(one):
    return endless(one) if one.index == 1 else perfect(one)


@pytest.mark.parametrize("answer", [endless_alone, huge_index_alone])
@pytest.mark.parametrize("rows", [StepRowPlanner(ROW), PackedRowPlanner(ROW, capacity=8, min_fill=0.1)])
def test_answer_too_long_for_row_sets_sample_aside(trained, answer, rows):
    lines, seen, _ = trained(answer=answer, rows=rows, overlong=OverlongRule(ROW, None))
    (logged,) = [one for one in lines if one["event"] == "bad_sample"]
    assert logged["sample_id"] == "record-1"
    assert "fit a row; raise global_max_length" in logged["reason"]
    assert [one.record.index for one in seen] == [0, 2]
    (step,) = [one for one in lines if one["event"] == "step"]
    assert (step["bad_samples"], step["bad_samples_total"], step["rollout/gt_objects"]) == (1, 1, 2)
    assert math.isfinite(step["loss"])


def test_answer_too_long_for_row_stops_run_that_allows_no_bad_sample(trained):
    with pytest.raises(PackingError, match="global_max_length"):
        trained(answer=endless_alone, rows=StepRowPlanner(ROW), overlong=OverlongRule(ROW, None), most_bad=0)


def test_step_of_only_overlong_answers_stops_run(trained):
    with pytest.raises(BadStepError, match=r"all 3 samples of step 0 were set aside\. The last: record-"):
        trained(answer=endless, rows=StepRowPlanner(ROW), overlong=OverlongRule(ROW, None))


@pytest.mark.parametrize("scope", ["unpacked", "micro", "step"])
def test_bad_sample_does_not_change_loss_or_gradient_of_others(trained, image_paths, model, scope):
    """The loss of a step is that of the samples that are left: places, seeds and rows of theirs do not change."""

    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]
    trained(records=records[1:], rows=planner_of(scope), learning_rate=0.0)
    spoilt = [record(image_paths[0] + ".gone", 0, object_1=box("red box", 1, 1, 4, 4)), *records[1:]]
    lines, _, with_it = trained(records=spoilt, rows=planner_of(scope), learning_rate=0.0)
    first, second = [one for one in lines if one["event"] == "step"]
    assert second["bad_samples"] == 1
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
    assert with_it.backend.seeds == [17, 18, 19]


def test_step_with_single_bad_sample_trains_nothing_and_run_continues(trained, image_paths):
    lines, _, _ = trained(records=[record(image_paths[0] + ".gone", 0)], most_bad=1)
    (step,) = [one for one in lines if one["event"] == "step"]
    assert (step["loss"], step["grad_norm"], step["bad_samples"]) == (0.0, 0.0, 1)


def test_record_with_wrong_image_size_sets_sample_aside(trained, image_paths):
    records = [record(path, i, object_1=box("red box", 1, 1, 400, 400)) for i, path in enumerate(image_paths)]
    lines, seen, _ = trained(records=[records[0], replace(records[1], width=7), *records[2:]])
    (logged,) = [one for one in lines if one["event"] == "bad_sample"]
    assert (logged["sample_id"], logged["image"]) == ("record-1", image_paths[1])
    assert f"where its record says 7x{records[1].height}" in logged["reason"]
    assert 1 not in [one.record.index for one in seen]


class Loses:
    """Pixels that the cache has no room for are read again when rows are laid out; from then on these images fail.

    times: how often each fails.
    """

    def __init__(self, *images, times=99):
        self.left = dict.fromkeys(images, times)

    def __call__(self, learner):
        cache = learner.passes.cache
        read = cache.pixels

        def pixels(images):
            for image in images:
                if self.left.get(image, 0) > 0:
                    self.left[image] -= 1
                    raise ImageError.at(image, "it is gone")
            return read(images)

        cache.pixels = pixels


def planner_of(scope):
    return {"unpacked": lambda: None, "micro": lambda: PackedRowPlanner(600, capacity=8, min_fill=0.1),
            "window": lambda: WindowRowPlanner(600, window=1, partial=PackedRowPlanner(600, capacity=8, min_fill=0.1)),
            "step": lambda: StepRowPlanner(600)}[scope]()  # fmt: skip


def events(lines, event):
    return [one for one in lines if one["event"] == event]


@pytest.mark.parametrize("scope", ["unpacked", "micro", "window", "step"])
def test_sample_lost_at_layout_counts_in_its_own_step(trained, image_paths, tmp_path, scope):
    lines, _, _ = trained(rows=planner_of(scope), prepare=Loses(image_paths[1]), save_strategy="steps", save_steps=1)
    (lost,) = events(lines, "bad_sample")
    assert (lost["sample_id"], lost["part"], lost["step"]) == ("record-1", "train", 0)
    assert "it is gone" in lost["reason"]
    (step,) = events(lines, "step")
    assert (step["bad_samples"], step["bad_samples_total"], step["rollout/gt_objects"]) == (1, 1, 2)
    assert [one["sample_id"] for one in json.loads((tmp_path / "checkpoint-1" / FILE).read_text())] == ["record-1"]


def test_sample_lost_at_layout_in_last_step_counts(trained, image_paths):
    lines, _, _ = trained(prepare=Loses(image_paths[2]), per_device_train_batch_size=1, max_steps=3)
    bad = [step["bad_samples"] for step in events(lines, "step")]
    assert sum(bad) == 1
    assert [step["bad_samples_total"] for step in events(lines, "step")] == [sum(bad[: i + 1]) for i in range(3)]
    (lost,) = events(lines, "bad_sample")
    assert lost["step"] == bad.index(1)


def test_sample_lost_repeatedly_counts_in_each_step_and_once_in_run(trained, image_paths):
    lines, _, _ = trained(prepare=Loses(image_paths[0]), max_steps=3)
    assert [(step["bad_samples"], step["bad_samples_total"]) for step in events(lines, "step")] == [(1, 1)] * 3


def test_sample_lost_once_and_readable_again_counts_only_in_first_step(trained, image_paths):
    lines, _, _ = trained(prepare=Loses(image_paths[0], times=1), m_steps=2, max_steps=2)
    steps = [(step["bad_samples"], step["bad_samples_total"]) for step in events(lines, "step")]
    assert steps == [(1, 1), (0, 1)]


def test_sample_lost_while_waiting_for_row_counts_in_step_of_that_row(trained, image_paths):
    rows = PackedRowPlanner(ROW // 2, capacity=8, min_fill=0.1)
    lines, _, _ = trained(rows=rows, prepare=Loses(*image_paths), max_steps=2)
    steps = events(lines, "step")
    laid_out = [step["packing/post_rollout_segments"] for step in steps]
    assert [step["bad_samples"] for step in steps] == laid_out == [1, 1]
    assert [step["bad_samples_total"] for step in steps] == [1, 2]


def test_sample_lost_after_waiting_for_row_is_added_to_step_that_loses_it():
    new, waited = SampleStats(gt_objects=2, sample_id="new"), [SampleStats(gt_objects=3, sample_id="waited")]
    joined = StepRecord.joined([StepRecord(samples=[new], lost=waited), StepRecord(lost=waited)])
    assert joined.samples == [new, SampleStats(bad=True, sample_id="waited")]


def test_losing_sample_does_not_remove_another_with_same_id():
    small, large = (SampleStats(gt_objects=objects, sample_id="same") for objects in (1, 9))
    joined = StepRecord.joined([StepRecord(samples=[small, large], lost=[large])])
    assert joined.samples == [small, SampleStats(bad=True, sample_id="same")]


def test_skipped_sample_lost_at_layout_counts_once(trained, image_paths):
    lines, _, _ = trained(answer=endless_alone, overlong=OverlongRule(ROW, "skip"), prepare=Loses(image_paths[1]))
    (step,) = events(lines, "step")
    assert (step["bad_samples"], step["rollout/overlong_skipped"], step["rollout/gt_objects"]) == (1, 0, 2)


def test_sample_lost_by_second_process_is_counted_as_bad():
    kept, lost = (SampleStats(gt_objects=2, sample_id=name) for name in ("kept", "lost"))
    joined = StepRecord.joined([StepRecord(samples=[kept]), StepRecord(samples=[lost], lost=[lost])])
    assert joined.samples == [kept, SampleStats(bad=True, sample_id="lost")]


def test_sample_lost_at_layout_is_counted_in_stage_1(trained, image_paths):
    lines, _, _ = trained(prepare=Loses(image_paths[1]), supervised={})
    (step,) = events(lines, "step")
    assert (step["bad_samples"], step["bad_samples_total"], step["supervised/objects"]) == (1, 1, 2)


def test_stage_1_step_with_only_bad_sample_logs_stage_1_metrics(trained, image_paths):
    for only in (record(image_paths[0] + ".gone", 0), record(image_paths[0], 0)):
        lines, _, _ = trained(records=[only], prepare=Loses(image_paths[0]), supervised={})
        step = events(lines, "step")[-1]
        assert (step["bad_samples"], step["supervised/objects"]) == (1, 0)
        assert not any(name.startswith(("rollout/", "sync/")) for name in step)


def test_first_sample_lost_at_layout_stops_run_that_allows_no_bad_sample(trained, image_paths, tmp_path):
    with pytest.raises(ImageError, match="it is gone"):
        trained(prepare=Loses(image_paths[1]), most_bad=0)
    (step,) = read_log(tmp_path, "step")
    assert (step["bad_samples"], step["bad_samples_total"]) == (1, 1)


def test_too_many_samples_lost_at_layout_stop_run_after_step_is_logged(trained, image_paths, tmp_path):
    with pytest.raises(TooManyBadSamples, match=r"and 2 were in this run\. The last: record-"):
        trained(prepare=Loses(*image_paths[:2]), most_bad=1)
    (step,) = read_log(tmp_path, "step")
    assert (step["bad_samples"], step["bad_samples_total"]) == (2, 2)


def test_step_with_all_samples_lost_at_layout_stops_run(trained, image_paths, tmp_path):
    with pytest.raises(BadStepError, match=r"all 3 samples of step 0 were set aside\. The last: record-"):
        trained(prepare=Loses(*image_paths))
    assert len(read_log(tmp_path, "step")) == 1


def test_step_with_all_samples_refused_or_lost_at_layout_stops_run(trained, image_paths):
    records = [record(image_paths[0] + ".gone", 0), *(record(path, i) for i, path in enumerate(image_paths[1:], 1))]
    with pytest.raises(BadStepError, match="all 3 samples of step 0"):
        trained(records=records, prepare=Loses(*image_paths))


def test_resumed_run_above_bad_sample_limit_stops_only_at_next_bad_sample(tmp_path):
    samples = BadSamples(1, SimpleNamespace(write=lambda *_: None))
    samples.lose(BadSample("a", (), ValueError("gone")))
    samples.lose(BadSample("b", (), ValueError("gone")))
    with pytest.raises(TooManyBadSamples, match="and 2 were in this run"):
        samples.note_lost(step=0, of=5, bad=2)
    samples.save(tmp_path, before=1)
    resumed = BadSamples(1, SimpleNamespace(write=lambda *_: None))
    resumed.load(tmp_path)
    resumed.note([], step=1, of=5)
    assert resumed.total == 2
    with pytest.raises(TooManyBadSamples, match=r"and 2 were in this run\. The last: b: gone"):
        resumed.note([BadSample("b", (), ValueError("gone"))], step=2, of=5)


@pytest.mark.parametrize("rows", ["unpacked", "step", "shared"])
def test_samples_lost_by_any_process_count_on_all_processes(tmp_path, image_paths, rows):
    images = [str(shutil.copy(image_paths[0], tmp_path / f"{i}.png")) for i in range(4)]
    run_members(member_that_loses, tmp_path, free_port(), str(tmp_path), images, rows)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [2, 2, ["record-0", "record-1"], 2]


def member_that_loses(rank, port, folder, images, rows):
    """Be one of two learner processes; of four samples in one step, the pixels of the first two are lost at layout."""
    model, encoder = join(rank, port)
    objects = {"object_1": box("red box", 100, 100, 400, 400)}
    records = [record(image, i, **objects) for i, image in enumerate(images)]
    shared = rows == "shared"
    torch.distributed.init_process_group("gloo")
    planner = SharedRowPlanner(SingleRowPlanner(), ProcessExchange(Interrupt(2))) if shared else planner_of(rows)
    size = {"per_device_train_batch_size": 4 if shared else 2, "ddp_backend": "gloo"}
    run = build(Path(folder, f"rank-{rank}"), model, encoder, records, rows=planner, **size)
    Loses(*images[:2])(run.learner)
    run.learner.train()
    figures, noted = run.learner.log.figures, sorted(name for name, _ in run.learner.passes.bad._noted)
    counted = [figures["bad_samples"], figures["bad_samples_total"], noted, figures["rollout/gt_objects"]]
    Path(folder, f"{rank}.json").write_text(json.dumps(counted))


# --- answers too long for a row: cut after whole objects, skipped, or refused ----------------------------------------


def too_long(trained, what, answer=endless_alone, rows=None, **options):
    """Train a step with an answer that is too long for a row; returns what was matched and the step's record."""
    lines, seen, _ = trained(
        answer=answer, rows=rows or StepRowPlanner(ROW), overlong=OverlongRule(ROW, what), **options
    )
    return seen, [one for one in lines if one["event"] == "step"][-1]


def test_overlong_answer_is_cut_after_as_many_objects_as_fit(trained, encoder):
    seen, logged = too_long(trained, "cut")
    (cut,) = [one for one in seen if one.kept is not None]
    assert (logged["rollout/overlong_cut"], logged["rollout/overlong_skipped"]) == (1, 0)
    objects = json.loads(cut.target.y_train_text)
    assert 1 < len(objects) < 9
    assert objects["object_1"]["desc"] == "red box"
    length = len(cut.rollout.prompt_token_ids) + cut.target.train_len + len(encoder.end_of_turn_ids)
    one_object = (cut.target.train_len - 2) // len(objects)
    assert ROW - one_object - 4 <= length <= ROW
    lines = [rollout_document(one) for one in seen]
    assert sum("kept_tokens" in line for line in lines) == 1
    assert all(one.same for one in replay(lines, encoder.tokenizer)), "it can be replayed"


@pytest.mark.parametrize("rows", [None, PackedRowPlanner(ROW, capacity=8, min_fill=0.1)])
def test_overlong_answer_is_skipped_when_rule_is_skip(trained, rows):
    seen, logged = too_long(trained, "skip", rows=rows)
    assert [one.skipped for one in sorted(seen, key=lambda one: one.record.index)] == [False, True, False]
    assert logged["rollout/overlong_skipped"] == 1


def test_sample_with_too_long_ground_truth_is_skipped(trained, image_paths):
    many = {f"object_{i}": box("red box", 100, 100, 400, 400 + i) for i in range(1, 9)}
    records = [record(image_paths[0], 0, **many), record(image_paths[1], 1, object_1=many["object_1"])]
    _, logged = too_long(trained, "cut", answer=perfect, records=records)
    assert (logged["rollout/overlong_cut"], logged["rollout/overlong_skipped"]) == (0, 1)


def test_overlong_answer_stops_run_when_rule_is_error(trained):
    with pytest.raises(PackingError, match="post_rollout_overlong"):
        too_long(trained, "error")
