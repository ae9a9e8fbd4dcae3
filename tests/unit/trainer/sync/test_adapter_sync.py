"""What an adapter sync sends, and what vLLM could not serve."""

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from stage2_trainer.sync.fleet import adapter
from stage2_trainer.sync.fleet.adapter import adapter_config, adapter_obstacle, adapter_weights, push_adapter
from stage2_trainer.sync.fleet.server import Update
from stage2_trainer.sync.tensors.merge import merged_weights
from tests.unit.trainer.sync.test_merge import adapted


def test_sent_adapter_tensors_and_config_equal_peft_checkpoint(tiny, tmp_path):
    model = adapted(tiny, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 2}, use_rslora=True)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    sent = dict(adapter_weights(model))
    assert sent.keys() == saved.keys()
    assert all((sent[name] == saved[name]).all() for name in saved)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    config = json.loads(json.dumps(adapter_config(model)))
    assert {name: sorted(v) if isinstance(v := written[name], list) else v for name in config} == config


def test_adapter_on_language_model_can_be_served(tiny):
    assert adapter_obstacle(adapted(tiny)) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["linear_fc1"]}, "model.visual"),
        ({"modules_to_save": ["merger"]}, "merger.*trains and is no LoRA matrix"),
        ({"r": 600}, "rank 600"),
        ({"rank_pattern": {"q_proj": 600}}, "rank 600"),
    ],
)
def test_adapter_that_vllm_cannot_serve_is_refused_with_reason(tiny, options, reason):
    found = adapter_obstacle(adapted(tiny, **options))
    assert found is not None
    assert re.search(reason, found)


def test_model_without_adapter_cannot_use_adapter_sync(tiny):
    assert "train_type is full" in adapter_obstacle(tiny)


def test_base_weights_are_sent_without_adapter(tiny):
    model = adapted(tiny)
    own = dict(merged_weights(tiny))
    sent = dict(merged_weights(model).unmerged())
    assert sent.keys() == own.keys()
    assert all((sent[name] == own[name]).all() for name in own)


def test_adapter_names_are_unique_even_for_same_version(tiny, monkeypatch):
    monkeypatch.setattr(adapter, "send", lambda *_: None)
    fleet = SimpleNamespace(update=lambda: nullcontext(Update([])), report=lambda update, version, **fields: fields)
    model = adapted(tiny)
    assert len({push_adapter(fleet, model, version=3)["adapter"] for _ in range(20)}) == 20
