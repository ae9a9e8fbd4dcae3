"""The figures of a step do not depend on how its rows are packed and divided: each scope, one process and two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stage2_trainer.learner.loss import LossFigures, step_losses
from stage2_trainer.learner.rows import (
    PackedRowPlanner,
    SharedRowPlanner,
    SingleRowPlanner,
    StepRowPlanner,
    WindowRowPlanner,
)
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.first_process import ProcessExchange
from tests.support.ports import free_port
from tests.unit.trainer.learner.harness import box, build, only_first, perfect, record
from tests.unit.trainer.learner.processes import join, run_members

ROW = 300  # tokens; one or two of the samples
SCOPES = {
    "no packing": SingleRowPlanner,
    "micro": lambda: PackedRowPlanner(ROW, capacity=8, min_fill=0.1),
    "window": lambda: WindowRowPlanner(ROW, window=6, partial=PackedRowPlanner(ROW, capacity=8, min_fill=0.1)),
    "step": lambda: StepRowPlanner(ROW),
}
APART = "records apart"
MEASURED = ("time/", "step/", "memory/", "servers", "rollout/gen_tokens_per_s")
"""Figures that measure this machine."""


def losses(total, *, ce=0.0, coord=0.0, prefix=(), tail=(), tokens=0):
    """The losses of a pass: the sums come from the coordinates' own losses."""
    values = torch.tensor([total, ce, coord, sum(prefix), sum(tail)], dtype=torch.float32)
    return LossFigures(values, tokens, len(prefix), len(tail))


def test_coordinate_loss_is_mean_over_coordinates_not_over_passes():
    passes = [
        losses(3.0, ce=1.0, coord=2.0, prefix=[1.0, 2.0, 3.0], tokens=4),
        losses(1.0, ce=1.0, tokens=4),  # a pass without coordinates
        losses(8.0, coord=8.0, prefix=[8.0], tail=[8.0]),  # and one without ordinary tokens
    ]
    expected = {
        "loss": (3 + 1 + 8) / 3,
        "loss/ce": (1 + 1 + 0) / 3,
        "loss/coord": (2 + 0 + 8) / 3,
        "loss/coord_prefix": (1 + 2 + 3 + 8) / 4,
        "loss/coord_tail": 8.0,
    }
    assert step_losses(passes) == pytest.approx(expected)
    assert step_losses(passes[1:2]) == {**dict.fromkeys(expected), "loss": 1.0, "loss/ce": 1.0}
    assert step_losses(passes[2:])["loss/ce"] is None


def records_of(paths):
    """Records of two boxes, of one, and of none."""
    red, blue = box("red box", 100, 100, 400, 400), box("blue box", 500, 500, 900, 800)
    objects = [{"object_1": red, "object_2": blue}] * 3 + [{"object_1": blue}, {}, {"object_1": red}]
    return [record(paths[i % 3], i, **one) for i, one in enumerate(objects)]


def some(one):
    """Samples with coordinates in prefix and tail, in the prefix alone, in the tail alone, and without any."""
    return (only_first, perfect, only_first, lambda _: "{}", perfect, perfect)[one.index](one)


def figures(folder, model, encoder, paths, rows, **options):
    """The record of one step whose weights do not move."""
    model.zero_grad()
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6, "learning_rate": 0.0, "seed": 3}
    run = build(folder, model, encoder, records_of(paths), answer=some, rows=rows, **{**arguments, **options})
    run.train()
    return (run.lines("step") or [{}])[-1]


def member(rank, port, folder, paths):
    """One of two learner processes: they share the rows of each scope, or each has records of its own."""
    model, encoder = join(rank, port)
    torch.distributed.init_process_group("gloo")
    shared = {scope: SharedRowPlanner(planner(), ProcessExchange(Interrupt())) for scope, planner in SCOPES.items()}
    for scope, rows in {**shared, APART: SingleRowPlanner()}.items():
        options = {"gradient_accumulation_steps": 3} if scope == APART else {}
        found = figures(Path(folder, f"{rank}-{scope}"), model, encoder, paths, rows, ddp_backend="gloo", **options)
        if rank == 0:
            Path(folder, f"{scope}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory, image_paths):
    """The record of each scope's step in two processes."""
    folder = tmp_path_factory.mktemp("two")
    run_members(member, folder, free_port(), str(folder), image_paths)
    return {scope: json.loads((folder / f"{scope}.json").read_text()) for scope in (*SCOPES, APART)}


@pytest.fixture
def model(model):
    from stage2_trainer.model.transformers_compat import disable_cache

    disable_cache(model)
    return model


@pytest.mark.parametrize("scope", [*SCOPES, APART])
def test_metrics_of_two_processes_equal_metrics_of_one_process(scope, of_two, tmp_path, model, encoder, image_paths):
    one, two = figures(tmp_path, model, encoder, image_paths, SCOPES.get(scope, SingleRowPlanner)()), of_two[scope]
    compared = [key for key in one if not key.startswith(MEASURED)]
    assert {key: two[key] for key in compared} == {
        key: value if isinstance(value, (str, list, type(None))) else pytest.approx(value, rel=2e-5)
        for key, value in one.items()
        if key in compared
    }
    assert one.keys() == two.keys()


@pytest.mark.parametrize("scope", ["no packing", "window", "step"])
def test_coordinate_losses_do_not_depend_on_packing_scope(scope, tmp_path, model, encoder, image_paths):
    whole = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
    expected = figures(tmp_path / "whole", model, encoder, image_paths, SingleRowPlanner(), **whole)
    found = figures(tmp_path / "scope", model, encoder, image_paths, SCOPES[scope]())
    for key in ("loss/coord_prefix", "loss/coord_tail"):
        assert found[key] == pytest.approx(expected[key], rel=2e-5), key
    assert found["loss"] == pytest.approx(found["loss/ce"] + found["loss/coord"], rel=2e-5)


def test_loss_over_token_kind_absent_from_step_is_null(tmp_path, model, encoder, image_paths):
    step = figures(tmp_path, model, encoder, image_paths[:1] * 3, SingleRowPlanner())
    assert step["loss/coord_tail"] > 0
    found = build(tmp_path / "right", model, encoder, records_of(image_paths)[:1], learning_rate=0.0).train()
    (right,) = [one for one in found if one["event"] == "step"]
    assert right["loss/coord_tail"] is None
    assert right["loss/coord_prefix"] == pytest.approx(right["loss/coord"], rel=1e-6)
