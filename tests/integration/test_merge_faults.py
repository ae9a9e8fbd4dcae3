"""Faults of a merge at the server: caught by digests, in every dtype, before a sync counts.

Servers are stubs: what merges and answers in them is the code that a vLLM server runs.
"""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage2_api.errors import ConfigError
from stage2_trainer.sync.fleet import delivery
from stage2_trainer.sync.fleet.merge_location import NO_ADAPTER
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.sync.tensors import announcement
from stage2_trainer.wire.errors import ServerError
from tests.integration import policies
from tests.integration.conftest import BOTH_DTYPES

pytestmark = BOTH_DTYPES


@pytest.fixture
def policy(base):
    policy = policies.adapter_of(base, "dora")
    policies.train_on(policy, 0.02)
    return policy


def tampered(monkeypatch, change):
    """Let the recipe of a merge at the server be another one when it is sent."""
    honest = announcement.recipe

    def recipe(*what):
        header = json.loads(json.dumps(honest(*what)))
        if header["merge"]["tensors"]:
            change(header["merge"]["tensors"])
        return header

    monkeypatch.setattr(delivery, "recipe", recipe)


def wrong_scaling(tensors):
    next(t for t in tensors if t["name"].endswith("layers.1.mlp.down_proj.weight"))["scaling"] *= 1.0001


def lost_layer(tensors):
    tensors[:] = [t for t in tensors if not t["name"].endswith("layers.1.mlp.down_proj.weight")]


def unmerged_layer(tensors):
    next(t for t in tensors if t["name"].endswith("layers.1.mlp.down_proj.weight"))["scaling"] = None


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("fault", [wrong_scaling, lost_layer, unmerged_layer])
def test_wrong_merged_layer_is_named_and_learner_merges_from_then_on(
    fault, sync_by, policy, client, probe, monkeypatch, caplog, dtype
):
    sync = sync_by()
    sync.push(policy, version=1)
    policies.train_on(policy, 0.02)
    tampered(monkeypatch, fault)
    with caplog.at_level(logging.WARNING):
        report = sync.push(policy, version=2)
    assert "layers.1.mlp.down_proj" in caplog.text
    assert "layers.0" not in caplog.text
    assert "the learner merges for the rest of the run" in caplog.text
    assert report.merge == "learner"
    policies.verify(policy, probe, [client], tolerance=policies.TOLERANCES[dtype])


def test_permuted_layers_are_named(sync_by, policy, monkeypatch):
    honest = delivery.parts_of
    swapped = {"layers.0.mlp.up_proj": "layers.1.mlp.up_proj", "layers.1.mlp.up_proj": "layers.0.mlp.up_proj"}

    def parts_of(name, adapter):
        other = next((name.replace(a, b) for a, b in swapped.items() if a in name), name)
        return honest(other, adapter)

    monkeypatch.setattr(delivery, "parts_of", parts_of)
    sync = sync_by(merge="server")
    with pytest.raises(ProofError, match=r"layers.0.mlp.gate_up_proj, .*layers.1.mlp.gate_up_proj"):
        sync.push(policy, version=1)


def test_failed_merge_stops_run_when_server_merge_is_required(sync_by, policy, monkeypatch):
    tampered(monkeypatch, lost_layer)
    with pytest.raises(ProofError, match=r"sync.merge is server, .*layers.1.mlp.down_proj.*set it to auto"):
        sync_by(merge="server").push(policy, version=1)


def test_missing_adapter_tensors_are_server_error(sync_by, policy, monkeypatch):
    monkeypatch.setattr(delivery, "_parts", lambda entry: [])
    with pytest.raises(ServerError, match=r"proj\.weight#up"):
        sync_by().push(policy, version=1)


def test_different_base_model_of_server_is_named_before_run_starts(sync_by, base, caplog, dtype):
    """Of all weights of the learner's memory one bit differs from the server's folder."""
    policy = policies.adapter_of(base, "lora")
    layer = policy.get_base_model().model.language_model.layers[1].mlp.down_proj.base_layer
    with torch.no_grad():
        layer.weight.view(-1)[7] += 0.125
    with pytest.raises(ConfigError, match=r"vllm.sync.merge.*server.*layers.1.mlp.down_proj.weight.*auto"):
        sync_by(merge="server").choose_location(policy)
    sync = sync_by()
    with caplog.at_level(logging.INFO):
        sync.choose_location(policy)
    assert sync.location.effective == "learner"
    assert "layers.1.mlp.down_proj.weight" in caplog.text
    assert "layers.1.mlp.down_proj.weight" in sync.location.reason
    report = sync.push(policy, version=1)
    assert (report.merge, report.merge_reason) == ("learner", sync.location.reason)


def test_policy_without_adapters_needs_no_server_merge(sync_by, base):
    sync = sync_by()
    sync.choose_location(base)
    assert (sync.location.effective, sync.location.reason) == ("learner", NO_ADAPTER)
    with pytest.raises(ConfigError, match="no adapter trains"):
        sync_by(merge="server").choose_location(base)


def test_model_folder_replaced_before_restart_is_detected(start_server, make_sync, base, model_path, tmp_path, dtype):
    policy = policies.adapter_of(base, "dora")
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    sync = make_sync(start_server("stub", dtype=dtype, model=folder))
    assert sync.push(policy, version=1).merge == "server"
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, folder / "other.safetensors")
    (folder / "other.safetensors").replace(folder / "model.safetensors")
    sync.fleet.sessions[0].lose()
    assert sync.push(policy, version=2).merge == "learner"
