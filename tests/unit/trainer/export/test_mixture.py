"""Exported mixtures of experts: transformers computes the same with them, in the stock layout, which vLLM needs."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from stage2_api.errors import ConfigError
from stage2_trainer.export.checkpoint_folder import open_checkpoint
from stage2_trainer.export.model_export import export_adapter, export_model
from stage2_trainer.main import learn
from stage2_trainer.model.policy import load_model
from stage2_trainer.prepare.coordinate_tokens import prepare
from tests.unit.trainer.export.trained import KINDS, learner_model, load, logits, saved, trained
from tests.unit.trainer.learner.configs import run_config, write_box_records
from tests.unit.trainer.prepare.stock_models import mixture_of, stock

pytestmark = pytest.mark.in_turns(3, apart=True)


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts in the stock layout, with coordinate tokens."""
    folder = tmp_path_factory.mktemp("mixture")
    prepare(str(mixture_of(stock(folder / "plain"), folder / "stock")), folder / "prepared")
    return folder / "prepared"


@pytest.mark.parametrize("kind", ["lora", "dora", "merger trained whole", "both trained whole", "full"])
def test_exported_moe_model_matches_learner_logits_in_stock_layout(mixture, tmp_path, kind):
    assert kind in KINDS
    model = trained(mixture, kind)
    opened = open_checkpoint(saved(model, mixture, tmp_path / "run"), model=str(mixture))
    export_model(opened, tmp_path / "out", dtype=torch.float32)
    assert (logits(load(tmp_path / "out")) - logits(model)).abs().max() < 1e-5
    before, after = tensors(mixture), tensors(tmp_path / "out")
    assert {name: after[name].shape for name in before} == {name: tensor.shape for name, tensor in before.items()}
    experts = [name for name in before if ".experts." in name]
    assert experts
    learners = model.state_dict()
    for name in experts:
        if kind == "full":
            assert torch.equal(after[name], learners[name].transpose(1, 2))
            assert not torch.equal(after[name], before[name])
        else:
            assert torch.equal(after[name], before[name].float())


@pytest.mark.parametrize("tuner", [{"train_type": "full"}, {"modules_to_save": ["experts"]}])
def test_moe_experts_trained_in_stage_1_are_exported(mixture, tmp_path, image_paths, tuner):
    data = write_box_records(tmp_path / "train.jsonl", image_paths[0])
    times = {"max_steps": 1, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}
    config = run_config(
        model={"model": str(mixture), "torch_dtype": "float32"},
        tuner=tuner,
        training={"output_dir": str(tmp_path / "run"), "gradient_checkpointing": False, **times},
        custom={"train_jsonl": data, "trainer_variant": "sft"},
    )
    assert learn(config) == 0
    opened = open_checkpoint(tmp_path / "run" / "checkpoint-1", model=str(mixture))
    export_model(opened, tmp_path / "out", dtype=torch.float32)
    assert (logits(load(tmp_path / "out")) - logits(learner_model(opened))).abs().max() < 1e-5
    before, after = tensors(mixture), tensors(tmp_path / "out")
    experts = [name for name in before if ".experts." in name]
    assert all(before[name].shape == after[name].shape for name in before)
    assert not any(torch.equal(before[name].float(), after[name]) for name in experts)


def test_exported_moe_adapter_matches_learner_logits_on_base_model(mixture, tmp_path):
    model = trained(mixture, "lora")
    opened = open_checkpoint(saved(model, mixture, tmp_path / "run"), model=str(mixture))
    assert export_adapter(opened, tmp_path / "adapter").obstacle is None
    again = PeftModel.from_pretrained(load(mixture), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model))
    whole = open_checkpoint(saved(trained(mixture, "full"), mixture, tmp_path / "full"), model=str(mixture))
    with pytest.raises(ConfigError, match=r"trained in full.*export without --adapter"):
        export_adapter(whole, tmp_path / "other")


def test_moe_model_with_square_experts_is_refused(tmp_path):
    """transformers and we tell the layouts by their shapes."""
    square = mixture_of(stock(tmp_path / "plain"), tmp_path / "stock", intermediate=64)
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj.* is 128 x 128"):
        prepare(str(square), tmp_path / "made")
    opened = open_checkpoint(saved(trained(square, "lora"), square, tmp_path / "run"), model=str(square))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj.* is 128 x 128"):
        export_model(opened, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"model\.model.*experts\.gate_up_proj.* is 128 x 128"):
        load_model(square, dtype=torch.float32, attn_implementation=None)
