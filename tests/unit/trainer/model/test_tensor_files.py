"""A checkpoint that somebody has tampered with runs nothing when a run goes on from it, and is named."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from dataclasses import dataclass

import pytest
import torch

from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_trainer import main
from stage2_trainer.model.tensor_files import FORCED, UNFORCED, load_tensors, refuse_code, tensors_alone
from tests.support.hostile_checkpoints import Command, plant
from tests.unit.trainer.learner.configs import run_config, write_box_records

STEPS = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model_path, image_paths):
    """A function that learns, in a folder, up to a step, and the folder of a run of one step."""
    data = write_box_records(tmp_path_factory.mktemp("data") / "train.jsonl", image_paths[0])

    def learn(folder, steps):
        config = run_config(
            training={
                "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 1, "save_steps": 1,
                "gradient_checkpointing": False, "resume": "allow-changes", "eval_strategy": "no",
                "save_strategy": "steps",
            },
            train_jsonl=data,
            model={"model": str(model_path), "torch_dtype": "float32", "attn_impl": "sdpa"},
            tuner={"train_type": "lora", "lora_rank": 2},
            global_max_length=512,
        )  # fmt: skip
        custom = config.custom.model_copy(update={"trainer_variant": "sft", "val_jsonl": None})
        return main.learn(config.model_copy(update={"custom": custom}))

    folder = tmp_path_factory.mktemp("run")
    assert learn(folder, 1) == 0
    return learn, folder


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_checkpoint_file_with_code_is_refused_without_running_it(trained, tmp_path, termination_log, name):
    learn, whole = trained
    shutil.copytree(whole, tmp_path / "run")
    file, made = tmp_path / "run" / "checkpoint-1" / name, tmp_path / "made"
    assert file.exists()
    plant(file, made)
    assert learn(tmp_path / "run", STEPS) == EXIT_CONFIG
    message = json.loads(termination_log.read_text())["message"]
    assert f"{file.name} must hold tensors and settings only" in message
    assert "it names posix.mkdir" in message
    assert "remove this one" in message
    assert not made.exists()


def test_own_checkpoint_is_resumed(trained, tmp_path):
    learn, whole = trained
    shutil.copytree(whole, tmp_path / "run")
    assert learn(tmp_path / "run", STEPS) == 0
    assert (tmp_path / "run" / f"checkpoint-{STEPS}").exists()
    assert FORCED not in os.environ, "what was set for the run is taken back"


def test_deepspeed_loads_only_tensors_and_its_own_classes(tmp_path):
    engines = pytest.importorskip("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    engine = engines.TorchCheckpointEngine()
    file = str(tmp_path / "optim_states.pt")
    torch.save({"a": Command(tmp_path / "made by DeepSpeed")}, file)
    engine.load(file)
    assert (tmp_path / "made by DeepSpeed").exists(), "by itself it runs what a file names"

    torch.save({"a": Command(tmp_path / "made")}, file)
    with tensors_alone(deepspeed=True), pytest.raises(Exception, match=r"posix\.mkdir"):
        engine.load(file)
    assert not (tmp_path / "made").exists()

    kept = {"stage": ZeroStageEnum.gradients, "scaler": LossScaler(2.0), "part": fragment_address(3, 4)}
    torch.save(kept, file)
    with tensors_alone(deepspeed=True):
        found = engine.load(file)
    assert (found["stage"], found["part"]) == (kept["stage"], kept["part"])
    assert found["scaler"].cur_scale == kept["scaler"].cur_scale
    with tensors_alone(deepspeed=False), pytest.raises(Exception, match=r"ZeroStage|LossScaler|fragment|getattr"):
        engine.load(file)


@dataclass
class Attribute:
    """Pickled as a call of `getattr`, as members of enumerations are by Python 3.11.2, which Debian 12 has."""

    of: object
    name: str

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_enumeration_written_by_early_python_3_11_is_loaded_and_other_attributes_are_refused(tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    file = tmp_path / "optim_states.pt"
    torch.save({"stage": Attribute(ZeroStageEnum, "gradients")}, file)
    with tensors_alone(deepspeed=True):
        assert torch.load(file) == {"stage": ZeroStageEnum.gradients}
        for other in (Attribute(LossScaler, "backward"), Attribute(torch.Tensor, "numpy")):
            torch.save({"stage": other}, file)
            with pytest.raises(pickle.UnpicklingError, match=r"builtins\.getattr"):
                torch.load(file)
        torch.save({"stage": Attribute(ZeroStageEnum, "__init__")}, file)
        with pytest.raises(KeyError):
            torch.load(file)


@pytest.mark.parametrize("zipped", [True, False], ids=["of today", "in the older form"])
def test_checkpoint_scan_finds_code_and_accepts_tensor_files(tmp_path, zipped):
    torch.save({"a": torch.ones(4), "b": [1, "two"]}, tmp_path / "optimizer.pt", _use_new_zipfile_serialization=zipped)
    torch.save({"b": Command(tmp_path / "made")}, tmp_path / "z.bin", _use_new_zipfile_serialization=zipped)
    with tensors_alone(deepspeed=False), pytest.raises(ConfigError) as refused:
        refuse_code(tmp_path, path="training.output_dir", deepspeed=False)
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("training.output_dir", str(tmp_path))
    assert problem.rule.startswith("z.bin must hold tensors and settings only")
    assert not (tmp_path / "made").exists()


def test_checkpoint_scan_passes_over_state_that_only_deepspeed_loads(tmp_path):
    """`stage2 evaluate` refused each checkpoint of a run with DeepSpeed, as if somebody had tampered with it."""
    (tmp_path / "global_step1").mkdir()
    torch.save({"b": Command(tmp_path / "made")}, tmp_path / "global_step1" / "optim_states.pt")
    with tensors_alone(deepspeed=False):
        refuse_code(tmp_path, path="--checkpoint", deepspeed=False)
        with pytest.raises(ConfigError, match=r"optim_states\.pt must hold tensors and settings only"):
            refuse_code(tmp_path, path="training.output_dir", deepspeed=True)


def test_corrupt_tensor_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"\x80\x02cposix\nsystem\n")
    with pytest.raises(ConfigError, match=r"optimizer\.pt"):
        load_tensors(tmp_path / "optimizer.pt", path="training.output_dir")


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_disk_or_memory_error_on_loading_is_not_reported_as_bad_file(tmp_path, monkeypatch, failure):
    """No message may advise removing a good checkpoint, and no job may end for good."""

    def fails(*_, **__):
        raise failure

    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(type(failure)):
        load_tensors(tmp_path / "optimizer.pt", path="training.output_dir")


def test_environment_variable_that_disables_safe_loading_is_refused(monkeypatch):
    monkeypatch.setenv(UNFORCED, "1")
    with pytest.raises(ConfigError, match=UNFORCED), tensors_alone(deepspeed=False):
        pass
