"""Golden vectors of loss and packing."""

import pytest
import torch

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import LossTargets, soft_targets, stage2_loss
from stage2_trainer.packing import PackingError, pack_window, select_segments
from tests.unit.trainer.matching.golden import golden

TERMS = [(case, term) for case in golden()["loss"] for term in ("soft_ce", "w1", "gate") if term in case]


@pytest.mark.parametrize(("case", "term"), TERMS)
def test_loss_terms(case, term):
    weights = {f"{name}_weight": float(name == term) for name in ("soft_ce", "w1", "gate")}
    logits = torch.zeros(1, 1000 + case["others"])
    if case["peak"] is not None:
        logits[:] = -1e4
        logits[0, case["peak"]] = 1e4
    none = torch.zeros(0, dtype=torch.int64)
    targets = LossTargets(torch.tensor([1]), none, torch.tensor([case["target"]]), torch.tensor([True]), 1, 1, 1)
    parts = stage2_loss(logits, targets, torch.arange(1000), RolloutMatching(**weights))
    assert parts.coord.item() == pytest.approx(case[term], abs=1e-6)


@pytest.mark.parametrize("case", golden()["soft_target"])
def test_soft_target(case):
    options = RolloutMatching(target_sigma=case["sigma"], target_truncate=case["truncate"])
    (found,) = soft_targets(torch.tensor([case["target"]]), options, torch.float64)
    assert found.sum().item() == pytest.approx(1)
    first = case["from"]
    assert found[first : first + len(case["weights"])].tolist() == pytest.approx(case["weights"], abs=1e-6)
    if "entropy" in case:
        assert -torch.special.xlogy(found, found).sum().item() == pytest.approx(case["entropy"], abs=1e-6)


@pytest.mark.parametrize("case", golden()["select"])
def test_select(case):
    assert select_segments(case["lengths"], case["cap"]) == case["chosen"]


@pytest.mark.parametrize("case", golden()["window"])
def test_window(case):
    if not case["feasible"]:
        with pytest.raises(PackingError):
            pack_window(case["lengths"], case["cap"], case["rows"])
        return
    rows = pack_window(case["lengths"], case["cap"], case["rows"])
    assert len(rows) == case["rows"]
    assert max(sum(case["lengths"][i] for i in row) for row in rows) <= case["cap"]
