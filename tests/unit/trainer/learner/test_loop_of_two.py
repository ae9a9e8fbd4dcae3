"""Two processes train together, and resume what they have saved: DistributedDataParallel, ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stage2_trainer.learner.rows import StepRowPlanner
from stage2_trainer.model.deepspeed_compat import compile_nothing
from stage2_trainer.model.policy import adapt
from stage2_trainer.model.run_checkpoints import Checkpoints
from tests.support.ports import free_port
from tests.unit.trainer.learner.harness import build, only_first, two_boxes
from tests.unit.trainer.learner.processes import join, run_members

pytestmark = pytest.mark.in_turns(2, apart=True)
FIGURES = ("loss", "loss/ce", "loss/coord", "grad_norm", "learning_rate")
SAVED = 2
OPTIONS = {
    "max_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "weight_decay": 0.1,
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "seed": 7, "save_strategy": "steps", "save_steps": SAVED,
    "max_grad_norm": 0.5,
}  # fmt: skip
ADAPTERS = {
    "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "use_dora": True, "target_modules": ["all-linear"],
    "modules_to_save": None,
}  # fmt: skip
AUTOMATIC = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def zero(stage):
    sizes = dict.fromkeys(AUTOMATIC, "auto") if stage == 3 else {}
    whole = {"stage3_gather_16bit_weights_on_model_save": True}
    return {
        "zero_optimization": {"stage": stage, "overlap_comm": False, **whole, **sizes},
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }


SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}
CASES = {
    "DistributedDataParallel": {"ddp_backend": "gloo"},
    "DistributedDataParallel, rows of the step, checkpointing": {
        "ddp_backend": "gloo", "rows": 400,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "ZeRO-2": {"deepspeed": zero(2)},
    "ZeRO-2, adapters, a schedule of its own": {
        "deepspeed": zero(2) | {"scheduler": SCHEDULE}, "adapters": ADAPTERS,
    },
    "ZeRO-3": {"deepspeed": zero(3)},
}  # fmt: skip


def member(rank, port, folder, paths, case, checkpoint):
    """One of two learner processes, each with its share of the records; writes what it trained."""
    folder, options = Path(folder), {**OPTIONS, **CASES[case]}
    rows, adapters = options.pop("rows", None), options.pop("adapters", None)
    policy, encoder = join(rank, port)
    if adapters:
        torch.manual_seed(3)
        policy = adapt(policy, ["vit", "aligner"], adapters)
    if "deepspeed" in options:
        compile_nothing()
    records = two_boxes([paths[i % len(paths)] for i in range(6)])
    harness = build(folder / f"rank-{rank}", policy, encoder, records, answer=only_first,
                    rows=StepRowPlanner(rows) if rows else None, **options)  # fmt: skip
    learner = harness.learner
    learner.checkpoints = Checkpoints(folder, limit=None, course={}, records=(), proved=harness.proved)
    learner.train(checkpoint and Path(checkpoint))
    figures = [[line[name] for name in FIGURES] for line in harness.lines("step")]
    parts = [
        getattr(one, "ds_tensor", one).detach() for one in learner.engine.wrapped.parameters() if one.requires_grad
    ]
    torch.save((figures, parts), folder / f"{rank}.pt")


@pytest.fixture
def train(tmp_path, image_paths):
    """A function that trains a case; returns figures and weights of either process, and a checkpoint."""

    def run(case, name, *, checkpoint=None):
        folder = tmp_path / name
        folder.mkdir()
        run_members(member, folder, free_port(), str(folder), image_paths, case, checkpoint and str(checkpoint))
        return [torch.load(folder / f"{rank}.pt") for rank in range(2)], folder / f"checkpoint-{SAVED}"

    return run


def assert_same(found, expected, *, steps=0):
    """Compare two runs bit by bit, from a step on."""
    for (figures, weights), (others, other_weights) in zip(found, expected, strict=True):
        assert figures == others[steps:]
        assert len(weights) == len(other_weights) > 0
        assert all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("case", CASES)
def test_two_resumed_processes_equal_uninterrupted_ones(train, case):
    whole, checkpoint = train(case, "whole")
    (figures, weights), (others, other_weights) = whole
    assert figures == others
    if "deepspeed" not in CASES[case]:
        assert all(map(torch.equal, weights, other_weights))
    assert_same(train(case, "resumed", checkpoint=checkpoint)[0], whole, steps=SAVED)
