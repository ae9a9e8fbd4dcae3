"""What an export refuses: folders that are no whole checkpoints, and base models that are missing or others."""

import json
import shutil

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.export.checkpoint_folder import open_checkpoint
from stage2_trainer.export.model_export import model_card
from stage2_trainer.export.trained_checkpoint import MergedStream
from tests.unit.trainer.export.trained import saved, trained


def test_truncated_checkpoint_is_refused(dora, tmp_path):
    cut = shutil.copytree(dora, tmp_path / "checkpoint-3")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"must be a whole checkpoint \(adapter_model.safetensors has"):
        open_checkpoint(cut)


def test_checkpoint_without_weights_is_refused(dora, tmp_path):
    bare = shutil.copytree(dora, tmp_path / "checkpoint-3")
    (bare / "adapter_model.safetensors").unlink()
    (bare / "stage2_checkpoint.json").unlink()
    with pytest.raises(ConfigError, match="it has no weights"):
        open_checkpoint(bare)


def test_run_folder_opens_best_checkpoint_or_else_newest(dora, tmp_path):
    run = tmp_path / "run"
    for step in (3, 9):
        shutil.copytree(dora, run / f"checkpoint-{step}")
    assert open_checkpoint(run).folder == run / "checkpoint-9"
    newest = run / "checkpoint-9"
    (newest / "stage2_checkpoint.json").unlink()
    state = json.loads((newest / "trainer_state.json").read_text())
    (newest / "trainer_state.json").write_text(json.dumps({**state, "best_model_checkpoint": "/moved/checkpoint-3"}))
    assert open_checkpoint(run).folder == run / "checkpoint-3"
    shutil.rmtree(run / "checkpoint-3")
    assert open_checkpoint(run).folder == newest


def test_missing_checkpoint_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be the folder of a checkpoint"):
        open_checkpoint(tmp_path / "lost")


def test_base_model_is_found_in_adapter_config_or_run_log(dora, model_path, tmp_path):
    assert open_checkpoint(dora).base == model_path
    moved = shutil.copytree(dora.parent, tmp_path / "run") / dora.name
    config = json.loads((moved / "adapter_config.json").read_text())
    gone = json.dumps({**config, "base_model_name_or_path": "gone"})
    (moved / "adapter_config.json").write_text(gone.ljust((moved / "adapter_config.json").stat().st_size))
    with pytest.raises(ConfigError, match=r"--model: 'gone'.*--model NAME"):
        open_checkpoint(moved)
    (moved.parent / "stage2_log.jsonl").write_text(json.dumps({"event": "reproducibility", "model": str(model_path)}))
    assert open_checkpoint(moved).base == model_path


def test_base_model_from_hub_cache_keeps_its_hub_name(dora, model_path, tmp_path):
    cached = tmp_path / "hub" / "models--org--base" / "snapshots" / "0f3c"
    shutil.copytree(model_path, cached)
    opened = open_checkpoint(dora, model=str(cached))
    assert (opened.base, opened.base_name) == (cached, "org/base")
    assert "base_model: org/base" in model_card(opened, merged=True)


def test_unknown_base_model_is_refused(dora, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^--model: 'org/lost'; is no folder here"):
        open_checkpoint(dora, model="org/lost")


def test_base_model_with_other_weights_than_run_is_refused(model_path, tmp_path):
    checkpoint = saved(trained(model_path, "lora"), model_path, tmp_path, course={"model.model": "sha256 00"})
    with pytest.raises(ConfigError, match="holds other weights"):
        open_checkpoint(checkpoint, model=str(model_path))


def test_adapter_that_does_not_fit_base_model_is_refused(dora, bases, tmp_path):
    smaller = shutil.copytree(bases["untied"], tmp_path / "smaller")
    config = json.loads((smaller / "config.json").read_text())
    config["text_config"]["intermediate_size"] //= 2
    (smaller / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="must fit its base model"):
        MergedStream(open_checkpoint(dora, model=str(smaller)))
