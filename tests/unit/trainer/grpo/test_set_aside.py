"""Bad samples of a GRPO run: each costs itself, is named and counted, and moves no figure of the others."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from stage2_trainer.data.images import ImageError
from stage2_trainer.data.records import Record
from stage2_trainer.grpo import held_out_rewards as held_out_rewards_module
from stage2_trainer.rollouts.bad_samples import BadSample, BadSamples
from stage2_trainer.rollouts.errors import BadStepError, TooManyBadSamples
from stage2_trainer.rollouts.rollout_source import LazySequence, readable
from stage2_trainer.telemetry.answer_tables import HeldOutAnswer
from stage2_trainer.telemetry.run_log import RunLog, SilentLog
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Refused, RolloutRequest
from tests.unit.trainer.grpo import harness
from tests.unit.trainer.grpo.harness import answers, gradient, scored
from tests.unit.trainer.learner.processes import run_members

pytestmark = pytest.mark.in_turns(2, apart=True)
BY_TOKENS = {"rlhf": {"loss_type": "dapo"}}  # a mean over tokens: those of others show at once


class Refusing(harness.Scripted):
    """Refuses the requests at some places."""

    def __init__(self, encoder, script, places):
        super().__init__(encoder, script)
        self.places = places

    def generate(self, request):
        found = super().generate(request)
        error = ServerError("http://s", "rollout", "the prompt is too long", status=400)
        for place in self.places:
            found.rollouts[place] = Refused(error)
        return found


class Reading(harness.Scripted):
    """Refuses what cannot be read, as every source does."""

    def generate(self, request):
        asked = LazySequence(len(request.chats), lambda index: RolloutRequest(list(request.chats[index])))
        looked_at = [readable(asked, index) for index in range(len(asked))]
        good = [one.messages for one in looked_at if isinstance(one, RolloutRequest)]
        made = iter(super().generate(replace(request, chats=good)).rollouts)
        outcomes = [one if isinstance(one, Refused) else next(made) for one in looked_at]
        return harness.RolloutBatch(outcomes, None, request.seeds(0))


def noted(folder):
    lines = [json.loads(line) for line in (folder / "stage2_log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "bad_sample"]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_refused_prompt_does_not_change_advantages_of_others(make, folder, model, encoder, estimator):
    script = answers(encoder)
    patches = BY_TOKENS, {"rlhf": {"advantage_estimator": estimator}}
    alone = make(*patches, source=harness.Scripted(encoder, script))
    alone.num_generations = 2
    expected = scored(alone, 0, 0)
    trainer = make(*patches, source=Refusing(encoder, script, (2, 3)))
    found = scored(trainer, 0, 0, 1, 1)
    assert expected["advantages"].abs().min() > 0
    torch.testing.assert_close(found["advantages"], torch.cat([expected["advantages"], torch.zeros(2)]))
    assert found["completion_mask"][2:].sum() == 0
    losses = alone._compute_loss(model, expected), trainer._compute_loss(model, found)
    torch.testing.assert_close(gradient(losses[1], model), gradient(losses[0], model))
    assert gradient(losses[0], model).norm() > 0
    assert trainer._metrics["train"]["reward"] == alone._metrics["train"]["reward"]
    assert trainer._bad == 1
    (line,) = noted(folder)
    assert (line["sample_id"], line["step"]) == (trainer.components.records[1].sample_id, 0)
    assert "too long" in line["reason"]


def test_unreadable_image_is_logged_and_run_continues(make, folder, encoder, image_paths):
    cut_off = folder / "cut-off.png"
    cut_off.write_bytes(Path(image_paths[1]).read_bytes()[:60])
    harness.write_records(folder, [image_paths[0], cut_off])
    saves = {"training": {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}}
    trainer = make(saves, source=Reading(encoder, answers(encoder)))
    row = pickle.loads(pickle.dumps(trainer.components.rows.row(1)))  # as from a data loader's process
    assert str(cut_off) in str(row["fault"])
    trainer.train()
    assert trainer.state.global_step == 2
    assert {line["image"] for line in noted(folder)} == {str(cut_off)}
    assert trainer.components.bad.total == 1
    kept = json.loads((folder / "out" / "checkpoint-2" / "bad_samples.json").read_text())
    assert [one["image"] for one in kept] == [str(cut_off)]


def test_run_stops_when_bad_samples_exceed_limit(make, encoder):
    trainer = make({"training": {"max_bad_samples": 0}}, source=Refusing(encoder, answers(encoder), (2, 3)))
    with pytest.raises((TooManyBadSamples, ServerError), match="too long"):
        trainer.train()


def test_step_of_only_bad_samples_stops_run(make, encoder):
    trainer = make(source=Refusing(encoder, answers(encoder), (0, 1, 2, 3)))
    with pytest.raises(BadStepError, match="all 2 samples"):
        trainer.train()


@pytest.fixture
def evaluated(make, folder, encoder):
    """A function that builds a trainer which evaluates two answers at a time to held-out records of these images."""

    def build(images):
        harness.write_records(folder, images, name="held-out.jsonl")
        custom = {"val_jsonl": str(folder / "held-out.jsonl")}
        training = {"eval_strategy": "steps", "per_device_eval_batch_size": 2}
        return make({"training": training, "custom": custom}, source=Reading(encoder, answers(encoder)))

    return build


@pytest.mark.parametrize(("own", "expected"), [("bc", {"reward": 2.0, "reward_std": 1.0}), ("", {"reward": 1.5})])
def test_held_out_answer_present_in_two_processes_counts_once(own, expected, monkeypatch, image_paths):
    def held_out(names):
        record = Record(0, "", (), 9, 9, ())
        return [
            HeldOutAnswer(replace(record, index="abc".index(name)), "", "stop", {"reward": "_abc".index(name)})
            for name in names
        ]

    first = {one.record.index: one.figures for one in held_out("ab")}
    monkeypatch.setattr(held_out_rewards_module, "gathered", lambda own: [first, own])
    found = held_out_rewards_module.held_out_rewards(held_out(own))
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.fixture
def cut_off(folder):
    """An image that cannot be read."""
    path = folder / "cut-off.png"
    path.write_bytes(b"")
    return path


def test_evaluation_counts_each_bad_sample_once(evaluated, folder, cut_off, image_paths):
    trainer = evaluated([image_paths[0], cut_off, cut_off, cut_off, image_paths[1]])
    for _ in range(2):  # each evaluation meets them again
        assert trainer.evaluate()["eval_bad_samples"] == 3.0
    names = [trainer.components.held_out.records[index].sample_id for index in (1, 2, 3)]
    assert sorted(line["sample_id"] for line in noted(folder)) == sorted(names * 2)
    assert {line["part"] for line in noted(folder)} == {"held-out"}
    assert trainer.components.bad.total == 0


def test_held_out_answer_table_has_rewards_and_no_bad_samples(evaluated, cut_off, image_paths):
    trainer, tables = evaluated([image_paths[0], cut_off, image_paths[1]]), []
    object.__setattr__(trainer.components, "tables", lambda step, answers: tables.append((step, list(answers))))
    trainer.evaluate()
    ((step, found),) = tables
    held_out = trainer.components.held_out.records
    assert (step, {one.record.sample_id for one in found}) == (0, {held_out[0].sample_id, held_out[2].sample_id})
    assert all(list(one.figures) == ["reward", *trainer.reward_func_names] for one in found)


def test_evaluation_of_only_bad_samples_stops_run(evaluated, cut_off):
    trainer = evaluated([cut_off] * 4)
    with pytest.raises(BadStepError, match=r"all 4 held-out samples .*cut-off"):
        trainer.evaluate()


def member(rank, port, folder):
    """One of two processes that both met sample b, as where a last batch is filled up."""
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    log = RunLog(Path(folder)) if rank == 0 else SilentLog()
    bad, names = BadSamples(100, log), ("ab", "bc")[rank]
    found = [BadSample(name, (), ImageError.at(name, "cannot be read")) for name in names]
    assert bad.note_held_out(found, step=0, of=4) == 3
    with pytest.raises(BadStepError, match="all 3 held-out"):
        bad.note_held_out(found, step=0, of=3)


def test_bad_held_out_sample_met_by_two_processes_counts_once(tmp_path, free_tcp_port):
    run_members(member, tmp_path, free_tcp_port, str(tmp_path))
    assert [line["sample_id"] for line in noted(tmp_path)] == ["a", "b", "c"] * 2


def test_chord_uses_next_reference_when_image_is_unreadable(make, folder, cut_off, image_paths):
    harness.write_records(folder, [image_paths[0], cut_off])
    inputs, _ = make().components.references.batch(0, 2, 0)
    assert torch.equal(inputs["input_ids"][0], inputs["input_ids"][1])
    harness.write_records(folder, [cut_off])
    trainer = make()
    with pytest.raises(ImageError, match="cut-off"):
        trainer.components.references.batch(0, 1, 0)
