"""Rows of a whole optimizer step: their gradient is that of the unpacked batch, whenever and wherever they are made."""

from __future__ import annotations

import random
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from stage2_trainer.data.images import ImageError
from stage2_trainer.learner import passes
from stage2_trainer.learner.passes import EARLY_SHARE, EarlyGradients
from stage2_trainer.learner.rows import StepRowPlanner
from stage2_trainer.wire.requests import request_seed
from tests.support.ports import free_port
from tests.unit.trainer.learner import harness
from tests.unit.trainer.learner.harness import ScriptedBackend, box, build, record, shifted
from tests.unit.trainer.learner.processes import join, run_members

CLOSE = 1e-5
ROW = 256  # tokens; two or three samples
PATIENCE_S = 60


def star(*bins):
    return {"desc": "star", "poly": list(bins)}


def records_of(image_paths, count=12):
    """Boxes, polygons, and records whose answers are empty."""
    return [
        record(
            image_paths[i % 3],
            i,
            object_1=box("red box", 100, 100, 400 + i, 400),
            **({"object_2": star(500, 500, 900, 520, 700, 800 + i)} if i % 2 else {}),
            **({"object_3": box("ball", 5, 5, 90 + i, 90)} if i % 4 == 0 else {}),
        )
        for i in range(count)
    ]


def some_empty(one):
    return "{}" if one.index % 5 == 2 else "" if one.index % 5 == 4 else shifted(one)


@dataclass
class LateBackend(ScriptedBackend):
    """Answers in an order and at times of its own; the last word comes once a row was trained on, known before it."""

    order: int = 0
    trains_early: ClassVar[bool] = True
    trained: ClassVar[threading.Event]

    def generate(self, requests, *, seed_plan, version=None, on_rollout=None, expected=()):
        self.trained.clear()
        self.seeds += [seed_plan.seed(i) for i in range(len(requests))]
        rollouts = [self._rollout(request, version or 0) for request in requests]
        order = list(range(len(rollouts)))
        random.Random(self.order).shuffle(order)
        for index in order:
            on_rollout(index, rollouts[index])
        if self.trains_early:
            assert self.trained.wait(PATIENCE_S), "no row was trained on while others were awaited"
        else:
            time.sleep(0.5)  # by the clock: long enough for a row; a slow machine can only miss the defect
        return rollouts


def kept_gradients(learner):
    """Return a dictionary that has the gradients by the names of weights when the optimizer steps."""
    kept, step = {}, learner.engine.step

    def keep(check):
        kept.update(
            {name: one.grad.clone() for name, one in learner.engine.policy.named_parameters() if one.grad is not None}
        )
        return step(check)

    learner.engine.step = keep
    return kept


OPTIONS = {"answer": some_empty, "learning_rate": 0.0, "max_grad_norm": 0.0, "seed": 3}


def gradients(folder, model, encoder, records, lost=(), **changes):
    """The gradient of one step on all records, and its record. lost: images that are gone when rows are laid out."""
    model.zero_grad()
    run = build(folder, model, encoder, records, **{**OPTIONS, **changes})
    read = run.learner.passes.cache.pixels

    def pixels(images):
        if set(images) & set(lost):
            raise ImageError.at(images[0], "it is gone")
        return read(images)

    run.learner.passes.cache.pixels = pixels
    kept = kept_gradients(run.learner)
    run.train()
    return kept, (run.lines("step") or [{}])[-1], run


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    largest = max(float(one.abs().max()) for one in expected.values())
    furthest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    print(f"largest gradient {largest:.3g}, furthest apart {furthest:.3g}")
    assert furthest < CLOSE * max(1.0, largest)


@pytest.fixture
def records(image_paths):
    return records_of(image_paths)


@pytest.fixture
def unpacked(tmp_path, model, encoder, records):
    return gradients(tmp_path / "unpacked", model, encoder, records)[:2]


def whole(**changes):
    return {"rows": StepRowPlanner(ROW), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 12, **changes}


def test_whole_step_gradient_equals_unpacked_batch(tmp_path, model, encoder, records, unpacked):
    found, logged, run = gradients(tmp_path / "step", model, encoder, records, **whole())
    assert_close(found, unpacked[0])
    for key in ("loss", "loss/ce", "loss/coord", "loss/coord_prefix", "loss/coord_tail"):
        assert logged[key] == pytest.approx(unpacked[1][key], rel=2e-5), key
    assert logged["packing/post_rollout_segments"] > 2
    assert logged["rollout/gt_objects"] == unpacked[1]["rollout/gt_objects"]
    assert run.backend.seeds == [request_seed(17, 0, micro_step, 0) for micro_step in range(12)]
    assert run.learner.state.global_step == 1


@pytest.fixture
def late(tmp_path, model, encoder, records, trained_early, monkeypatch):
    """A function that trains a step whose answers come in an order of their own; returns its gradient and its rows."""

    def train(order):
        monkeypatch.setattr(harness, "ScriptedBackend", lambda *args: LateBackend(*args, order=order))
        planner, seen = StepRowPlanner(ROW), []
        plan = planner.rows

        def rows(segments):
            for group in plan(segments):
                seen.append((group.place, [tuple(one.placed.encoding.input_ids.tolist()) for one in group.rows[0]]))
                yield group

        planner.rows = rows
        found, logged, _ = gradients(tmp_path / f"late-{order}", model, encoder, records, **whole(rows=planner))
        return found, sorted(seen), logged

    return train


@pytest.fixture
def trained_early(monkeypatch):
    """The rows that were trained on while answers were awaited."""
    early, add, trained = [], EarlyGradients.add, threading.Event()
    monkeypatch.setattr(EarlyGradients, "add", lambda self, *sums: (early.append(1), add(self, *sums), trained.set()))
    monkeypatch.setattr(LateBackend, "trained", trained, raising=False)
    return early


def test_rows_and_gradient_do_not_depend_on_arrival_order_of_answers(late, unpacked, trained_early):
    found = [late(order) for order in (1, 2)]
    for gradient, _, _ in found:
        assert_close(gradient, unpacked[0])
    assert found[0][1] == found[1][1]
    assert len(trained_early) >= 2, "no row was trained on while others were awaited"


@pytest.mark.parametrize("early", [True, False])
def test_lost_image_does_not_change_loss_or_gradient_of_others(
    early, tmp_path, model, encoder, records, image_paths, trained_early, monkeypatch
):
    """Whenever answers come: neither the loss nor the gradient of the others changes."""
    others = [*records[:3], *records[4:]]
    expected, logged, _ = gradients(
        tmp_path / "others", model, encoder, others, **whole(gradient_accumulation_steps=len(others))
    )
    gone = str(shutil.copy(image_paths[0], tmp_path / "gone.png"))
    spoilt = [*records[:3], replace(records[3], images=(gone,)), *records[4:]]
    if early:
        monkeypatch.setattr(harness, "ScriptedBackend", lambda *args: LateBackend(*args, order=1))
    found, again, run = gradients(tmp_path / "spoilt", model, encoder, spoilt, lost=[gone], **whole())
    assert bool(trained_early) == early
    assert run.learner.passes.bad.total == again["bad_samples"] == 1
    assert_close(found, expected)
    assert again["loss"] == pytest.approx(logged["loss"], rel=2e-5)


def test_dropout_does_not_depend_on_arrival_order_of_answers(late, unpacked, model, monkeypatch):
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            monkeypatch.setattr(module, "attention_dropout", 0.3)
    first, second = late(1)[0], late(2)[0]
    assert_close(second, first)
    with pytest.raises(AssertionError):
        assert_close(first, unpacked[0])


@pytest.mark.parametrize("enough", [True, False])
def test_rows_train_early_only_if_gradients_fit_share_of_memory(
    enough, late, unpacked, model, trained_early, monkeypatch, caplog
):
    needed = sum(one.nbytes for one in model.parameters())
    memory = int(needed / EARLY_SHARE) + (1 if enough else -(EARLY_SHARE**-1))
    monkeypatch.setattr(passes, "memory_bytes", lambda device: int(memory))
    monkeypatch.setattr(LateBackend, "trains_early", enough)
    caplog.set_level("INFO")
    assert_close(late(1)[0], unpacked[0])
    assert bool(trained_early) == enough
    early = "training starts before all answers have arrived"
    late_only = "training starts only after a step's last answer"
    logged = [one.message.partition(":")[0] for one in caplog.records if one.message.startswith((early, late_only))]
    assert logged == [early if enough else late_only]


def test_early_gradients_are_scaled_when_denominators_are_known(model):
    trained = [one for one in model.parameters() if one.requires_grad][:2]
    early = EarlyGradients(trained)
    for _ in range(2):
        early.add(sum(3 * one.sum() for one in trained), 5 * trained[0].sum())
    early.apply(ce=2.0, coord=10.0)
    assert [set(one.grad.flatten().tolist()) for one in trained] == [{4.0}, {3.0}]


def member(rank, port, folder, paths):
    """One of two learner processes, each with its share of the records."""
    model, encoder = join(rank, port)
    options = whole(gradient_accumulation_steps=6, ddp_backend="gloo")
    # the second process has far more tokens: it needs more rows
    options["rows"] = StepRowPlanner(ROW if rank else 4 * ROW)
    found, _, run = gradients(Path(folder, f"rank-{rank}"), model, encoder, records_of(paths), **options)
    torch.save((found, run.learner.log.figures), Path(folder, f"{rank}.pt"))


def test_two_processes_with_unequal_rows_have_same_gradient(tmp_path, image_paths, unpacked):
    run_members(member, tmp_path, free_port(), str(tmp_path), image_paths)
    for rank in range(2):
        found, figures = torch.load(tmp_path / f"{rank}.pt")
        assert_close(found, unpacked[0])
        assert figures["loss"] == pytest.approx(unpacked[1]["loss"], rel=2e-5)
