"""From the lines of a run alone comes, id by id, what was trained on."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from stage2_cli.main import app
from stage2_trainer.data.prompt_cache import PromptCache
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.matcher import Matcher
from stage2_trainer.learner.rollout_documents import rollout_document
from stage2_trainer.matching import CoordVocab, MatchOptions
from stage2_trainer.rollouts.replay import lines_of_step, replay
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import JsonLines
from stage2_trainer.telemetry.stopwatch import Stopwatch
from tests.unit.trainer.learner.harness import (
    PROMPTS,
    RecordingSync,
    ScriptedBackend,
    box,
    fresh_rollouts,
    only_first,
    perfect,
    record,
    shifted,
)


@pytest.fixture
def records(image_paths):
    objects = {"object_1": box("red box", 100, 100, 400, 400), "object_2": box("blue box", 500, 500, 900, 800)}
    return [record(path, i, **objects) for i, path in enumerate(image_paths)]


@pytest.fixture
def ran(encoder, model, records, tmp_path):
    """A function that makes a step's rollouts; it returns their lines and the ids that are trained on."""

    def run(answer, *, step=2, **options):
        log = JsonLines(tmp_path / "rollouts.jsonl")
        matcher = Matcher(CoordVocab.from_tokenizer(encoder.tokenizer), MatchOptions(**options), encoder.vision_ids)
        e_step = EStep(
            encoder=encoder,
            cache=PromptCache(encoder, 2**30),
            prompts=PROMPTS,
            rollouts=fresh_rollouts(
                ScriptedBackend(encoder, records, answer), RecordingSync(), Reporter(), lambda: None
            ),
            matcher=matcher,
            on_matched=lambda at, matched: [
                log.write({"event": "rollout", "part": "train", "step": at, **rollout_document(one)}) for one in matched
            ],
        )
        begun = e_step.begin([records], model, global_step=step, stopwatch=Stopwatch())
        segments = [begun.get(i, Stopwatch(), lambda: None) for i in range(len(records))]
        e_step.finish(begun)
        log.close()
        encodings = [segment.placed.encoding for segment in segments]
        trained = [one.input_ids[one.prompt_len : one.prompt_len + one.answer_len].tolist() for one in encodings]
        lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
        return lines, trained

    return run


@pytest.mark.parametrize("answer", [perfect, only_first, shifted])
@pytest.mark.parametrize("options", [{}, {"maskiou_gate": 0.9, "fn_cost": 2.0, "ot_cost": "l1"}])
def test_the_lines_rebuild_what_was_trained_on(ran, encoder, answer, options):
    lines, trained = ran(answer, **options)
    found = replay(lines_of_step(lines, 2), encoder.tokenizer)
    assert [list(one.target.y_train_ids) for one in found] == trained
    assert all(one.same for one in found)


def test_other_options_are_noticed(ran, encoder):
    lines, _ = ran(shifted)
    other = {**lines[0], "options": {**lines[0]["options"], "maskiou_gate": 0.999}}
    (found,) = replay([other], encoder.tokenizer)
    assert not found.same


def test_of_a_step_that_was_made_again_the_last_try_counts(ran):
    ran(perfect)
    lines, trained = ran(only_first)
    found = lines_of_step(lines, 2)
    assert [line["y_train_tokens"] for line in found] == [len(ids) for ids in trained]
    assert [line["index"] for line in found] == list(range(len(trained)))
    assert lines_of_step(lines, 3) == []


def test_the_command_shows_it_and_writes_the_ids(ran, encoder, tmp_path):
    _, trained = ran(only_first)
    encoder.tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "ids.jsonl"
    options = ["--step", "2", "--tokenizer", str(tmp_path / "model"), "--output", str(out)]
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "rollouts.jsonl"), *options])
    assert (done.exit_code, done.exception) == (0, None) or isinstance(done.exception, SystemExit), done.output
    assert [json.loads(line)["y_train_ids"] for line in out.read_text().splitlines()] == trained


def test_a_step_that_is_not_there_is_a_sentence(ran, tmp_path):
    ran(perfect)
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "rollouts.jsonl"), "--step", "7"])
    assert "must hold training rollouts of step 7" in str(done.exception)


def test_a_line_holds_all_that_the_options_of_matching_are(ran):
    lines, _ = ran(perfect)
    assert lines[0]["options"] == dataclasses.asdict(MatchOptions())
