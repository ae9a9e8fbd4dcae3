"""What a learner itself has saved is exported: no step between its last weights and a model that others load."""

import pytest
import torch

from stage2_trainer.export.model_export import export_model
from stage2_trainer.export.trained_checkpoint import open_checkpoint
from stage2_trainer.process.policy import ALIGNER, VIT, adapt
from tests.unit.trainer.export.trained import load
from tests.unit.trainer.learner.harness import box, build, record, shifted

DORA = {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["all-linear"]}
IDS = torch.tensor([[5, 100, 321, 7, 1200, 44, 3, 900]])


@pytest.mark.parametrize("adapted", [True, False])
def test_a_learners_own_checkpoint_is_exported(tmp_path, model, encoder, image_paths, model_path, adapted):
    policy = adapt(model, [VIT, ALIGNER], DORA) if adapted else model
    records = [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]
    harness = build(tmp_path / "run", policy, encoder, records, max_steps=2, learning_rate=1e-2, answer=shifted)
    harness.trainer.train()
    harness.trainer.save_progress()
    opened = open_checkpoint(tmp_path / "run" / "checkpoint-2", model=None if adapted else str(model_path))
    assert (opened.adapter is not None) == adapted
    export_model(opened, tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        learnt, base = policy.eval()(input_ids=IDS).logits, load(model_path)(input_ids=IDS).logits
        exported = load(tmp_path / "out")(input_ids=IDS).logits
    assert (exported - learnt).abs().max() < 1e-4
    assert (base - learnt).abs().max() > 1e-2
