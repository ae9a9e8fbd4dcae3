"""The trainer against TRL's own: the same answers make the same advantages and the same loss."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.data.records import load_records
from stage2_trainer.grpo.build import grpo_arguments
from stage2_trainer.grpo.loaded_rewards import Reward, RewardError
from stage2_trainer.grpo.objective import References
from stage2_trainer.grpo.task import Rows, Task, record_rules
from stage2_trainer.model.checkpoints import newest_whole
from stage2_trainer.model.policy import load_policy
from stage2_trainer.sync.fleet.report import PHASES, SyncReport
from stage2_trainer.telemetry.timeline import PARTS, TIMELINE, TraceFile
from tests.unit.trainer.grpo import harness
from tests.unit.trainer.grpo.harness import answers, gradient, scored
from tests.unit.trainer.learner.harness import read_log
from tests.unit.trainer.log_page import explained

pytestmark = pytest.mark.in_turns(2, apart=True)
KL = {"rlhf": {"beta": 0.5}}


def theirs(run, model, processor, trainer=GRPOTrainer, args=None):
    """TRL's own trainer, with its own generation by transformers, and its rows; both rewards score by length."""

    def by_length(completions, **_):
        return [_length(one[0]["content"]) for one in completions]

    task, rewards = Task.from_config(run), [by_length, by_length]
    records = load_records(run.custom.train_jsonl, rules=record_rules(run))
    processor.tokenizer.padding_side = "left"
    made = trainer(
        model=model,
        args=args or grpo_arguments(run, world_size=1, adapted=False),
        reward_funcs=rewards,
        train_dataset=Rows(records, task).dataset(),
        processing_class=processor,
    )
    return made, Rows(records, task)


def test_fewer_records_than_round_of_rollouts_needs_are_refused(folder):
    """The run ended well at once, without a single step."""
    assert len(checked_records(harness.config(folder), world_size=1).train) == 2
    training = {"training": {"effective_batch_size": 8}, "rlhf": {"generation_batch_size": 8}}
    with pytest.raises(ConfigError, match=r"^rlhf.generation_batch_size: 8; .* asks about 4 records, and .* has 2; "):
        checked_records(harness.config(folder, training), world_size=1)


@pytest.mark.parametrize("patch", [{}, KL, {"rlhf": {"loss_type": "dapo", "scale_rewards": "batch"}}])
def test_same_answers_give_advantages_and_loss_of_trl_grpo_trainer(make, folder, model, encoder, patch):
    run = harness.config(folder, patch)
    reference, rows = theirs(run, model, encoder.processor)
    batch = [rows.row(i) for i in (0, 0, 1, 1)]
    model.train()
    generated = []
    generate = reference._generate_single_turn
    reference._generate_single_turn = lambda *a, **k: generated.append(generate(*a, **k)) or generated[-1]
    reference.current_gradient_accumulation_steps = 1
    expected = reference._generate_and_score_completions([dict(row) for row in batch])
    loss = reference._compute_loss(model, expected)

    ours = rewarded(make(patch, source=harness.Scripted(encoder, generated[0][0])))
    found = ours._generate_and_score_completions([dict(row) for row in batch])
    assert expected["advantages"].abs().sum() > 0
    assert torch.equal(found["advantages"], expected["advantages"])
    assert torch.equal(found["completion_ids"], expected["completion_ids"])
    found_loss = ours._compute_loss(model, found)
    torch.testing.assert_close(found_loss, loss)
    # at the weights that answered, the loss may well be 0 and teach all the same: its gradient tells
    torch.testing.assert_close(gradient(found_loss, model), gradient(loss, model))
    assert gradient(loss, model).norm() > 0


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_rloo_advantages_equal_those_of_trl_rloo_trainer(make, folder, model, encoder, beta):
    patch = {"rlhf": {"advantage_estimator": "rloo", "kl_in_reward": True, "beta": beta, "num_generations": 4}}
    run = harness.config(folder, patch)
    script = answers(encoder)
    reference, rows = trls_rloo(run, model, encoder.processor)
    reference._generate_single_turn = lambda prompts, *_: [list(script[i]) for i in range(len(prompts))]
    ours = rewarded(make(patch))
    with torch.no_grad():  # away from the reference model, so that there is a divergence
        model.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.train()
    batch = [rows.row(0) for _ in script]
    expected = reference._generate_and_score_completions([dict(row) for row in batch])
    found = ours._generate_and_score_completions([dict(row) for row in batch])
    assert expected["advantages"].abs().min() > 0
    torch.testing.assert_close(found["advantages"], expected["advantages"])


def trls_rloo(run, model, processor):
    args = RLOOConfig(
        output_dir=run.training.output_dir,
        per_device_train_batch_size=4,
        num_generations=4,
        generation_batch_size=4,
        beta=run.rlhf.beta,
        reward_weights=run.rlhf.resolved_weights,
        normalize_advantages=False,
        max_completion_length=run.rlhf.max_completion_length,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    return theirs(run, model, processor, RLOOTrainer, args)


def _length(text):
    return float(len(text) % 7)


def rewarded(trainer, function=lambda sample: _length(sample.raw)):
    """A trainer with rewards that tell answers of the untrained model apart."""
    rewards = [Reward(name, 1.0, function) for name in trainer.components.rlhf.reward_funcs]
    trainer.components = replace(trainer.components, rewards=rewards)
    return trainer


def test_step_trains_on_rollouts_and_logs_mean_and_spread_of_rewards(make, folder, model, encoder):
    source = harness.Scripted(encoder, answers(encoder))
    before = model.model.language_model.layers[0].mlp.up_proj.weight.clone()
    make(source=source).train()
    assert not torch.equal(before, model.model.language_model.layers[0].mlp.up_proj.weight)
    (step,) = read_log(folder, "step")
    assert step["step"] == 1
    assert step["rewards/summary.format/mean"] == pytest.approx(0.75)
    assert step["rewards/summary.format/std"] == pytest.approx(0.5)
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [line["rewards"]["summary.format"] for line in lines] == [1.0, 1.0, 0.0, 1.0]
    assert sum(line["advantage"] for line in lines) == pytest.approx(0.0, abs=1e-4)
    for line in lines:
        assert line["reward"] == pytest.approx(
            line["rewards"]["summary.format"] + 2 * line["rewards"]["summary.content_f1"]
        )
        record = json.loads((folder / "train.jsonl").read_text().splitlines()[line["record"]])
        assert (line["sample_id"], [line["image"]]) == (f"train.jsonl:{line['record'] + 1}", record["images"])
    assert source.steps == [(0, 0)]


def test_step_reports_generation_speed(make, folder, encoder):
    trainer = make()
    trainer.train()
    (step,) = read_log(folder, "step")
    speed = sum(len(ids) for ids in answers(encoder)) / step["time/rollout_generate_s"]
    assert step["rollout/gen_tokens_per_s"] == pytest.approx(speed, rel=1e-3)
    assert (step["rollout/decode_steps_per_token"], step["rollout/draft_acceptance_rate"]) == (None, None)
    assert trainer.components.reporter.current.tokens_per_second == step["rollout/gen_tokens_per_s"]


def test_step_reports_drafts_of_each_server(make, folder, encoder):
    """Two of four answers come from b, each with a draft of three tokens of which two were accepted."""
    source = harness.Scripted(encoder, answers(encoder))
    drafted = {"server": "b", "drafted": 3, "accepted": 2, "verified": (0, 0, 1)}
    source.changes = [{"server": "a"}, drafted, {"server": "a"}, drafted]
    make(source=source).train()
    (step,) = read_log(folder, "step")
    first, second = step["drafts"]
    lengths = [len(ids) for ids in answers(encoder)]
    at_a, at_b = lengths[0] + lengths[2], lengths[1] + lengths[3]
    nothing = dict.fromkeys(("decode_steps_per_token", "draft_acceptance_rate", "accepted_by_position"))
    assert first == {"server": "a", "tokens": at_a, "drafted": 0, "accepted": 0, "verified": [], **nothing}
    assert second == {
        "server": "b",
        "tokens": at_b,
        "drafted": 6,
        "accepted": 4,
        "verified": [0, 0, 2],
        "decode_steps_per_token": (at_b - 4) / at_b,
        "draft_acceptance_rate": 4 / 6,
        "accepted_by_position": [1.0, 1.0],
    }
    assert step["rollout/decode_steps_per_token"] == pytest.approx((sum(lengths) - 4) / sum(lengths))


def test_step_reports_same_push_metrics_as_rollout_matching(make, folder, encoder):
    source = harness.Scripted(encoder, answers(encoder))
    phases = dict.fromkeys(PHASES, 0.25)
    source.sync = SyncReport.create(
        0, 2.0, ["a"], bytes=100, tensors=3, wire_bytes=1_500_000_000, transport="nccl", phase_seconds=phases,
        merge="server", merge_reason="why", rounding_kept=0.5,
    )  # fmt: skip
    make(source=source).train()
    (step,) = read_log(folder, "step")
    assert {name: step[name] for name in explained("Weights and memory") if name.startswith("sync/")} == {
        "sync/version": 0.0,
        "sync/seconds": 2.0,
        "sync/bytes": 100.0,
        "sync/wire_bytes": 1.5e9,
        "sync/gigabytes_per_second": 2.0,
        "sync/transport": "nccl",
        "sync/merge": "server",
        "sync/merge_reason": "why",
        **{f"sync/{phase}_s": 0.25 for phase in PHASES},
        "sync/proof_gap": None,
        "sync/rounding_kept": 0.5,
    }


def test_step_reports_seconds_of_each_phase(make, folder):
    trainer = make()
    TIMELINE.trace = TraceFile(folder / "trace.json", process="learner")
    trainer.train()
    TIMELINE.trace.close()
    TIMELINE.trace = None
    (step,) = read_log(folder, "step")
    parts = {part: step[f"step/{part}_s"] for part in PARTS}
    assert sum(parts.values()) == pytest.approx(step["step/wall_s"], rel=1e-3)
    assert all(parts[part] > 0 for part in ("forward", "backward", "optimizer", "log", "other"))
    assert parts["generate"] + parts["wait"] > 0, "scripted answers may be there before anybody waits for them"
    traced = {event["name"] for event in json.loads((folder / "trace.json").read_text())}
    assert {"step 1", "score", "rollout_generate", "forward", "backward", "optimizer"} <= traced


def test_step_reports_seconds_spent_in_rewards(make, folder):
    trainer = make()

    def takes_time(sample):
        time.sleep(0.1)  # by the clock: the seconds that have to be found
        return 0.5

    slow = [Reward("theirs.slow", 1.0, takes_time), trainer.components.rewards[1]]
    trainer.components = replace(trainer.components, rewards=slow)
    trainer.train()
    (step,) = read_log(folder, "step")
    assert 0.4 <= step["step/reward_s"] < step["step/wall_s"], "four answers"
    assert step["step/other_s"] + step["step/wait_s"] < step["step/wall_s"] - 0.4


@pytest.mark.parametrize(("effective", "needed"), [(4, False), (8, False), (2, True)])
def test_old_log_probabilities_are_computed_only_when_batch_plan_needs_them(make, effective, needed):
    batches = {"training": {"per_device_train_batch_size": 2, "effective_batch_size": effective}}
    assert ("old_per_token_logps" in scored(make(batches), 0, 0, 1, 1)) is needed


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_kl_divergence_is_subtracted_from_rewards_instead_of_added_to_loss(make, model, beta):
    patch = {"rlhf": {"kl_in_reward": True, "beta": beta, "advantage_estimator": "rloo"}}
    trainer = make(patch)
    with torch.no_grad():
        model.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    found = scored(trainer, 0, 0, 1, 1)
    trainer._compute_loss(model, found)
    assert "kl" not in trainer._metrics["train"]
    rewards = trainer._scores @ trainer.reward_weights
    assert torch.allclose(found["advantages"][:2], (rewards[:2] - rewards[:2].flip(0))) is (beta == 0.0)
    assert trainer.beta == beta


def test_chord_trains_on_reference_answers_with_decaying_weight(make, folder):
    chord = {"enabled": True, "sft_per_device_train_batch_size": 2, "mu_warmup_steps": 0, "mu_decay_steps": 10,
             "mu_peak": 0.75, "mu_valley": 0.1, "enable_phi_function": False}  # fmt: skip
    patches = {"custom": {"grpo": {"chord": chord}}}, {"training": {"max_steps": 8, "learning_rate": 3e-3}}
    make(*patches).train()
    steps = read_log(folder, "step")
    assert steps[0]["chord/mu"] == 0.75
    assert steps[-1]["chord/mu"] < 0.75
    assert steps[-1]["chord/loss"] < 0.5 * steps[0]["chord/loss"]


CHORD = {"enabled": True, "sft_per_device_train_batch_size": 1, "mu_warmup_steps": 0, "mu_decay_steps": 10,
         "mu_peak": 0.5, "mu_valley": 0.5, "enable_phi_function": False}  # fmt: skip
SIX_STEPS = {"training": {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}}


def test_resumed_run_asks_and_learns_what_uninterrupted_run_does(make, folder, image_paths, monkeypatch):
    """It asked in the order of the first epoch again, in the middle of another, and learned CHORD's first answers."""
    harness.write_records(folder, [*image_paths, *image_paths][:4])  # two steps of an epoch
    learned = []
    batch = References.batch
    monkeypatch.setattr(References, "batch", lambda self, *of: learned.append(of) or batch(self, *of))
    patches = {"custom": {"grpo": {"chord": CHORD}}}, SIX_STEPS
    make(*patches).train()
    asked = read_rollouts(folder)
    assert [one["step"] for one in asked[::4]] == [0, 1, 2, 3, 4, 5]
    make(*patches).train(folder / "out" / "checkpoint-3")
    assert read_rollouts(folder)[len(asked) :] == asked[12:]
    assert learned[6:] == learned[3:6]


def test_order_of_prompts_follows_data_seed(make, folder, image_paths):
    """GRPO ignored the key."""
    harness.write_records(folder, [*image_paths, *image_paths, *image_paths][:8])
    for seed in (None, 5, 6):
        make({"training": {"data_seed": seed, "seed": 5, "max_steps": 4}}).train()
    asked = read_rollouts(folder)
    assert asked[:16] == asked[16:32] != asked[32:]


def read_rollouts(folder):
    """The records that were asked about, step by step."""
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return [{key: one[key] for key in ("step", "record")} for one in lines]


def test_server_with_different_prompt_tokens_is_refused(make, encoder):
    source = harness.Scripted(encoder, answers(encoder))
    trainer = make(source=source)
    source._encoder = type("Shifted", (), {"prompt": lambda self, chat: type(
        "Prompt", (), {"input_ids": encoder.prompt(chat).input_ids[1:]})()})()  # fmt: skip
    with pytest.raises(ConfigError, match="reads the same prompt"):
        trainer.train()


def test_answer_is_cut_before_generated_image_token(make, encoder):
    image = encoder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    source = harness.Scripted(encoder, [[50, 60, image, 70], [image, 50]])
    found = scored(make(source=source), 0, 0, 1, 1)
    kept = [
        ids[there.bool()].tolist() for ids, there in zip(found["completion_ids"], found["completion_mask"], strict=True)
    ]
    assert kept[:2] == [[50, 60], encoder.end_of_turn_ids[:1]]
    assert not (found["completion_ids"] == image).any()


def test_adapter_dropout_does_not_change_importance_ratio(make, folder):
    tuner = {"train_type": "lora", "lora_rank": 4, "lora_dropout": 0.5}
    weights_move = {"per_device_train_batch_size": 2, "effective_batch_size": 2}
    patch = {"tuner": tuner, "training": weights_move}
    adapted = load_policy(harness.config(folder, patch))
    with torch.no_grad():  # a fresh adapter adds nothing, whatever is dropped
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    trainer = make(patch, policy=adapted)
    adapted.train()
    found = scored(trainer, 0, 0, 1, 1)
    assert found["old_per_token_logps"].abs().sum() > 0
    torch.testing.assert_close(trainer._logprobs(found), found["old_per_token_logps"])


def test_progress_is_not_saved_once_deepspeed_steps_in_backward(make, monkeypatch):
    trainer = rewarded(make({"training": {"max_steps": 2}}))
    backward = trainer.accelerator.backward
    monkeypatch.setattr(type(trainer), "steps_in_backward", True)

    def struck(*args, **kwargs):
        backward(*args, **kwargs)
        if trainer.state.global_step == 1:
            raise ZeroDivisionError("struck")

    monkeypatch.setattr(trainer.accelerator, "backward", struck)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.save_progress()
    assert newest_whole(Path(trainer.args.output_dir)) is None


def test_failing_reward_stops_run_and_names_record(make):
    trainer = rewarded(make(), lambda sample: 1 / len(sample.objects))
    with pytest.raises(RewardError, match=r"reward summary\.format, record train\.jsonl:[12]: 'ZeroDivisionError"):
        trainer.train()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda sample: sys.exit(3), r"SystemExit: 3.*ends the process at .*test_trainer\.py:\d+"),
        (lambda sample: None, r"returns None"),
        (lambda sample: "0.5", r"returns text"),
        (lambda sample: [0.5, 0.5], r"a value of type list.*once for each answer"),
        (lambda sample: float("nan"), r"must return a finite number"),
    ],
)
def test_reward_that_returns_no_number_stops_run(make, function, words):
    trainer = make()
    wrong = [Reward("theirs.wrong", 1.0, function, "test_trainer:wrong"), trainer.components.rewards[1]]
    trainer.components = replace(trainer.components, rewards=wrong)
    with pytest.raises(RewardError, match=words):
        trainer.train()


def test_reward_failing_in_another_process_stops_this_process(make, monkeypatch):
    error = RewardError([Problem("reward mine.own, record other.jsonl:3", "nan", "must return a finite number", "")])
    monkeypatch.setattr("stage2_trainer.grpo.trainer.gathered", lambda value, *_: [error] if value is None else [value])
    with pytest.raises(RewardError, match=r"other\.jsonl:3"):
        scored(make(), 0, 0, 1, 1)


def test_evaluation_reward_is_mean_over_samples_not_over_batches(make, folder, image_paths):
    """Three samples, two a batch: the last batch has one."""
    harness.write_records(folder, image_paths[:3], name="held-out.jsonl")
    training = {"eval_strategy": "steps", "per_device_eval_batch_size": 2}
    trainer = make({"training": training, "custom": {"val_jsonl": str(folder / "held-out.jsonl")}})
    found = trainer.evaluate()
    (logged,) = read_log(folder, "evaluation")
    answered = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    rewards = [one["reward"] for one in answered]
    f1 = torch.tensor([one["rewards"]["summary.content_f1"] for one in answered], dtype=torch.float64)
    assert sum(rewards) / 3 != pytest.approx(((rewards[0] + rewards[1]) / 2 + rewards[2]) / 2)
    assert found["eval_reward"] == logged["eval_reward"] == pytest.approx(sum(rewards) / 3)
    assert logged["eval_rewards/summary.content_f1/mean"] == pytest.approx(f1.mean().item())
    assert logged["eval_rewards/summary.content_f1/std"] == pytest.approx(f1.std().item())


def test_terminated_answer_lengths_are_null_when_all_answers_are_cut(make, folder, encoder):
    cut = [ids[:-1] for ids in answers(encoder)]
    make(source=harness.Scripted(encoder, cut)).train()
    make(source=harness.Scripted(encoder, answers(encoder))).train()
    whole = [len(ids) for ids in answers(encoder)]
    first, second = read_log(folder, "step")
    names = [f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max")]
    assert (first["completions/clipped_ratio"], [first[name] for name in names]) == (1.0, [None] * 3)
    assert [second[name] for name in names] == [pytest.approx(sum(whole) / 4), min(whole), max(whole)]
