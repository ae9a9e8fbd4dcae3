"""The loop of our own trains as the trainer does, bit by bit, and resumes what the trainer has saved."""

from __future__ import annotations

import copy
from functools import partialmethod
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from stage2_api.rollout_matching import RolloutMatching, Runaway
from stage2_trainer.learner.best import Best
from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.learner.loop import Learner
from stage2_trainer.learner.passes import RowPasses
from stage2_trainer.learner.rows import PackedRowPlanner, StepRowPlanner
from stage2_trainer.learner.runaway import RunawayWatch
from stage2_trainer.learner.schedule import Schedule
from stage2_trainer.learner.step import CurrentStep
from stage2_trainer.learner.step_log import History, StepLog
from stage2_trainer.process.finite import FiniteGuard
from stage2_trainer.process.policy import adapt
from stage2_trainer.process.ranks import rank, world_size
from stage2_trainer.telemetry.trackers import Trackers
from tests.unit.trainer.learner.harness import build, only_first, two_boxes

FIGURES = ("loss", "loss/ce", "loss/coord", "grad_norm", "learning_rate")
OF_TIME = ("_s", "_per_second", "runtime", "idle_share", "peak_bytes", "total_flos")
STEPS = {
    "max_steps": 4,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 2,
    "seed": 7,
}
SAVED = {"save_strategy": "steps", "save_steps": 3}
ADAPTERS = {
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_dora": True,
    "target_modules": ["all-linear"],
    "modules_to_save": None,
}


class Recorded(TrainerCallback):
    """A tracker that remembers what it is told."""

    told: ClassVar[list[tuple]] = []

    def note(self, args, state, control, *, event, logs=None, **kwargs):
        self.told.append((event, state.global_step, state.max_steps, state.is_world_process_zero, untimed(logs or {})))

    on_train_begin = partialmethod(note, event="begin")
    on_log = partialmethod(note, event="log")
    on_save = partialmethod(note, event="save")
    on_train_end = partialmethod(note, event="end")


def packed():
    """One segment fits into a row, so that others wait."""
    return PackedRowPlanner(130, capacity=16, min_fill=0.1)


def over_the_step():
    return StepRowPlanner(400)


CASES = {
    "micro, a pipeline, evaluations, a partial window": {
        "count": 5, "pipelined": True, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1,
        "report_to": ["tensorboard"],
    },
    "evaluations from the start, saved where one is better": {
        "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "save_strategy": "best",
        "metric_for_best_model": "rollout_f1", "report_to": ["tensorboard"],
    },
    "stage 1, saved where an evaluation is better or it is time": {
        "supervised": {}, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4,
        "metric_for_best_model": "rollout_fn", "greater_is_better": False,
    },
    "early rows over the step, SGD": {"rows": over_the_step, "count": 5, "optim": "sgd", "lr_scheduler_type": "linear"},
    "bfloat16, checkpointing, a mean over the window, nothing clipped": {
        "bf16": True, "loss": {"loss_normalizer": "window"}, "max_grad_norm": 0.0,
        "max_steps": 2, "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reused rollouts, Adafactor, a rate of its own": {
        "m_steps": 2, "optim": "adafactor", "rates": {"vit": 1e-4}, **SAVED,
    },
    "stage 1, packed": {"supervised": {}, "rows": packed, "per_device_train_batch_size": 2, **SAVED},
    "LoRA with dropout": {"rows": over_the_step, "adapters": {**ADAPTERS, "lora_dropout": 0.1}, **SAVED},
}  # fmt: skip
RESUMED = [name for name, case in CASES.items() if "save_steps" in case]


def learner_of(harness, rates) -> Learner:
    """Return a loop of a harness's parts."""
    parts, trainer = harness.trainer.components, harness.trainer
    args, policy = trainer.args, trainer._policy
    schedule = Schedule(
        trainer.train_dataset, args, readers=world_size(), reader=rank(), m_steps=parts.m_steps,
        pipelined=parts.pipelined,
    )  # fmt: skip
    engine = AccelerateEngine(
        policy, args, loss=parts.loss, vocab=parts.vocab, max_steps=schedule.max_steps, rates=rates,
        interrupt=parts.interrupt,
    )  # fmt: skip
    finite = FiniteGuard(policy, args.device, scaled=False)
    passes = RowPasses(
        engine=engine, planner=parts.rows, cache=parts.cache, bad=parts.bad, vocab=parts.vocab,
        pad_token_id=parts.pad_token_id, placeholder=parts.estep.placeholder, finite=finite, interrupt=parts.interrupt,
        reporter=parts.reporter, seed=args.seed,
    )  # fmt: skip
    log = StepLog(
        parts.log, parts.reporter, parts.bad, args.device,
        top_k=parts.top_k, reuses=parts.m_steps > 1, further=parts.descriptions,
    )  # fmt: skip
    return Learner(
        engine=engine, schedule=schedule, step=CurrentStep(parts.estep, parts.rows), passes=passes,
        mean="step" if parts.rows.whole_step else parts.loss.loss_normalizer, log=log,
        history=History(parts.log, parts.reporter, Trackers(args, model=policy), args.device), finite=finite,
        runaway=RunawayWatch(Runaway(enabled=False)), evaluation=parts.evaluation, held_out=trainer.eval_dataset,
        best=Best(args, parts.log, parts.reporter), checkpoints=trainer._checkpoints, interrupt=parts.interrupt,
    )  # fmt: skip


@pytest.fixture
def train(tmp_path, model, encoder, image_paths, monkeypatch):
    """A function that trains a case with the trainer or the loop; returns figures, history, evaluations, weights."""

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Recorded)

    def run(case, folder, *, loop, checkpoint=None):
        options = {**STEPS, **CASES[case]}
        rates, adapters, rows = (options.pop(name, None) for name in ("rates", "adapters", "rows"))
        policy = copy.deepcopy(model)
        if adapters is not None:
            torch.manual_seed(3)
            policy = adapt(policy, ["vit", "aligner"], adapters)
        records = two_boxes([image_paths[i % len(image_paths)] for i in range(options.pop("count", 6))])
        options["loss"] = RolloutMatching(**options.pop("loss", {}))
        planner = rows() if rows else None
        harness = build(tmp_path / folder, policy, encoder, records, answer=only_first, rows=planner, **options)
        if loop:
            learner = learner_of(harness, rates or {})
            learner.train(checkpoint)
            state = learner.state
        else:
            harness.trainer.part_rates = rates or {}
            harness.trainer.train(checkpoint and str(checkpoint))
            state = harness.trainer.state
        return {
            "steps": [{name: line[name] for name in FIGURES} for line in harness.lines("step")],
            "history": [untimed(line) for line in state.log_history],
            "evaluations": [untimed(line) for line in harness.lines("evaluation")],
            "best": [*harness.lines("best_checkpoint"), state.best_global_step, harness.reporter.current.best_score],
            "checkpoints": sorted(one.name for one in (tmp_path / folder).glob("checkpoint-*")),
            "told": [Recorded.told.pop(0) for _ in Recorded.told.copy()],
            "weights": {name: one.detach() for name, one in policy.named_parameters() if one.requires_grad},
        }

    return run


def untimed(line):
    return {name: value for name, value in line.items() if not name.endswith(OF_TIME)}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_the_loop_trains_bit_by_bit_as_the_trainer_does(train, tmp_path: Path, case):
    old, new = train(case, "old", loop=False), train(case, "new", loop=True)
    assert len(old["steps"]) >= 2
    for what in ("steps", "evaluations", "history", "best", "checkpoints", "told"):
        assert new[what] == old[what], what
    assert_same_weights(new["weights"], old["weights"])
    if case not in RESUMED:
        return
    for saved, loop in (("old", True), ("new", False)):
        resumed = train(case, f"{saved}, loop {loop}", loop=loop, checkpoint=tmp_path / saved / "checkpoint-3")
        assert resumed["steps"] == old["steps"][3:], (saved, loop)
        assert_same_weights(resumed["weights"], old["weights"])
