"""The engine: float16's scaler, schedules and optimizers of other kinds, and what a checkpoint holds."""

from __future__ import annotations

import copy
import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoProcessor, Trainer

from stage2_trainer.learner import engine as engines
from stage2_trainer.learner import optimizer as optimizers
from stage2_trainer.learner.run_state import load_weights, read_run, write_run
from tests.unit.trainer.learner.harness import build, only_first

FIGURES = ("loss", "grad_norm", "learning_rate")
OPTIONS = {
    "max_steps": 4, "per_device_train_batch_size": 1, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
    "warmup_steps": 2, "seed": 7, "optim": "adamw_torch", "answer": only_first,
}  # fmt: skip
SAVED = {"save_strategy": "steps", "save_steps": 2}
OVERFLOWS, FITS = 2.0**127, 2.0**4  # scales of a loss in float32


@pytest.fixture
def make(tmp_path, model, encoder, records):
    """A function that builds a harness in a folder of its own."""

    def build_one(name, **changes):
        return build(tmp_path / name, copy.deepcopy(model), encoder, records, **{**OPTIONS, **changes})

    return build_one


@pytest.fixture
def learner(make):
    return make("loop").learner


def scaler_of(scale):
    """The scaler of float16 on the CPU, where accelerate offers none."""
    return torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=FITS / OVERFLOWS)


def figures(harness):
    return [[repr(line[name]) for name in FIGURES] for line in harness.lines("step")]


@pytest.mark.parametrize("scale", [FITS, OVERFLOWS])
def test_fp16_scaler_skips_optimizer_and_schedule_on_overflow_and_resumes(make, monkeypatch, tmp_path, scale):
    real = engines.make_accelerator

    def make_accelerator(*arguments):
        accelerator = real(*arguments)
        accelerator.scaler = scaler_of(scale)
        return accelerator

    monkeypatch.setattr(engines, "make_accelerator", make_accelerator)

    def run(harness, checkpoint=None):
        harness.learner.finite._scaled = True
        assert not harness.learner.engine.keeps_gradients
        harness.learner.train(checkpoint)
        return figures(harness)

    whole = make("whole", **SAVED)
    found = run(whole)
    assert run(make("resumed"), tmp_path / "whole" / "checkpoint-2") == found[2:]
    rates = [float(line["learning_rate"]) for line in whole.lines("step")]
    assert (rates[0] == rates[1]) == (scale == OVERFLOWS), "a step that is skipped is no step of the warm-up"
    norms = [line["grad_norm"] for line in whole.lines("step")]
    assert max(one for one in norms if one is not None and math.isfinite(one)) < 1e3, "of gradients without the scale"


def test_8_bit_optimizer_keeps_embedding_state_in_32_bits(learner, monkeypatch):
    told = []
    manager = SimpleNamespace(register_module_override=lambda *what: told.append(what))
    package, optim = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    optim.GlobalOptimManager = SimpleNamespace(get_instance=lambda: manager)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)

    class EightBit(torch.optim.SGD):
        def __init__(self, groups, lr, optim_bits):
            super().__init__(groups, lr)

    monkeypatch.setattr(
        Trainer, "get_optimizer_cls_and_kwargs", lambda args, model: (EightBit, {"lr": 0.1, "optim_bits": 8})
    )
    policy = learner.engine.policy
    optimizers.create_optimizer(policy, learner.engine.args, {})
    tables = [one for one in policy.modules() if isinstance(one, torch.nn.Embedding)]
    assert told == [(table, "weight", {"optim_bits": 32}) for table in tables]
    assert len(told) > 1


def test_sharded_weights_are_loaded(learner, model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    policy = learner.engine.policy
    with torch.no_grad():
        for one in policy.parameters():
            one.zero_()
    load_weights(policy, tmp_path)
    assert all(map(torch.equal, policy.state_dict().values(), model.state_dict().values()))


def test_weights_with_other_parameter_names_are_refused(learner, model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"]["other." + name] = index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"missing are \['{name}'\], and unknown are \['other.{name}'\]"):
        load_weights(learner.engine.policy, tmp_path)


def test_checkpoint_without_optimizer_state_restarts_optimizer_and_schedule(make, tmp_path, caplog):
    make("saved", save_only_model=True, **SAVED).learner.train()
    saved = tmp_path / "saved" / "checkpoint-2"
    assert {one.name for one in saved.iterdir()} & {"optimizer.pt", "scheduler.pt"} == set()
    learner = make("resumed").learner
    state = read_run(saved, learner.engine)
    assert state.global_step == 2
    assert learner.engine.optimizer.state_dict()["state"] == {}
    assert "optimizer and schedule start afresh" in caplog.text


def test_checkpoint_contains_processor_files(learner, model_path, tmp_path):
    processor = AutoProcessor.from_pretrained(model_path)
    write_run(tmp_path, learner.engine, processor)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert again.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
