"""From the lines of a run alone comes, id by id, what was trained on."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from stage2_cli.main import app
from stage2_trainer.learner.listeners import rollout_document
from stage2_trainer.matching import MatchOptions
from stage2_trainer.rollouts.replay import lines_of_step, replay
from stage2_trainer.telemetry.run_log import JsonLines
from tests.unit.trainer.learner.harness import (
    ScriptedBackend,
    build_e_step,
    only_first,
    perfect,
    segments_of,
    shifted,
    trained_ids,
    two_boxes,
)


@pytest.fixture
def records(image_paths):
    return two_boxes(image_paths)


@pytest.fixture
def ran(encoder, model, records, tmp_path):
    """A function that makes a step's rollouts; it returns their lines and the ids that are trained on."""

    def run(answer, *, step=2, **options):
        log = JsonLines(tmp_path / "rollouts.jsonl")
        e_step = build_e_step(
            encoder,
            model,
            ScriptedBackend(encoder, records, answer),
            lambda at, matched: [
                log.write({"event": "rollout", "part": "train", "step": at, **rollout_document(one)}) for one in matched
            ],
            **options,
        )
        segments = segments_of(e_step, [records], global_step=step)
        log.close()
        lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
        return lines, [trained_ids(segment) for segment in segments]

    return run


@pytest.mark.parametrize("answer", [perfect, only_first, shifted])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maskiou_gate": 0.9, "fn_cost": 2.0, "ot_cost": "l1"},
        {"maskiou_gate": 0.9, "unmatched_objects": "dropped", "duplicate_iou": 0.5},
    ],
    ids=["defaults", "matching", "variants"],
)
def test_replay_of_log_lines_rebuilds_trained_tokens(ran, encoder, answer, options):
    lines, trained = ran(answer, **options)
    found = replay(lines_of_step(lines, 2), encoder.tokenizer)
    assert [list(one.target.y_train_ids) for one in found] == trained
    assert all(one.same for one in found)


def test_replay_with_other_options_is_reported_as_different(ran, encoder):
    lines, _ = ran(shifted)
    other = {**lines[0], "options": {**lines[0]["options"], "maskiou_gate": 0.999}}
    (found,) = replay([other], encoder.tokenizer)
    assert not found.same


def test_replay_of_cut_answer_rebuilds_only_kept_tokens(ran, encoder):
    lines, _ = ran(perfect)
    whole, cut = replay([lines[0], {**lines[0], "kept_tokens": 1}], encoder.tokenizer)
    assert (whole.same, cut.same) == (True, False)


def test_replay_uses_last_attempt_of_repeated_step(ran):
    ran(perfect)
    lines, trained = ran(only_first)
    found = lines_of_step(lines, 2)
    assert [line["y_train_tokens"] for line in found] == [len(ids) for ids in trained]
    assert [line["index"] for line in found] == list(range(len(trained)))
    assert lines_of_step(lines, 3) == []


def test_replay_command_writes_token_ids(ran, encoder, tmp_path):
    _, trained = ran(only_first)
    encoder.tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "ids.jsonl"
    options = ["--step", "3", "--tokenizer", str(tmp_path / "model"), "--output", str(out)]
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "rollouts.jsonl"), *options])
    assert (done.exit_code, done.exception) == (0, None) or isinstance(done.exception, SystemExit), done.output
    assert [json.loads(line)["y_train_ids"] for line in out.read_text().splitlines()] == trained


def test_replay_of_missing_step_is_refused(ran, tmp_path):
    ran(perfect)
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "rollouts.jsonl"), "--step", "7"])
    assert "must hold training rollouts of step 7" in str(done.exception)


def test_replay_with_option_of_other_version_is_refused(ran, tmp_path):
    lines, _ = ran(perfect)
    other = {**lines[0], "options": {**lines[0]["options"], "missed_place": "tail"}}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(other) + "\n")
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "rollouts.jsonl"), "--step", "3"])
    assert "missed_place" in str(done.exception)
    assert "use the version that wrote the file" in str(done.exception)


def test_rollout_line_contains_all_match_options(ran):
    lines, _ = ran(perfect)
    assert lines[0]["options"] == json.loads(json.dumps(dataclasses.asdict(MatchOptions())))
