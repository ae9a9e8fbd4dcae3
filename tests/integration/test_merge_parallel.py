"""Merges at a vLLM server of two workers, each with a half of every layer.

Both receive the adapter, merge it into base weights of the folder, and must agree with the learner's digests; their own
loader cuts what they are given. What bfloat16 changes in a merge is seen with one worker (test_merge_at_server.py).
The rollout server of a GRPO run is what can have several workers; the job of tests/jobs/test_grpo_job.py has two copies
of the model.
"""

import shutil

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForImageTextToText

from stage2_api.vllm import VllmSync
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.integration import policies
from tests.integration.conftest import ROOT, launch, stop, wait_until_healthy
from tests.support.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.in_turns(2, first=1)]

JOB = ROOT / "examples" / "job-grpo-6v2-tiny.yaml"
WORKERS = 2
TOKEN_BYTES = 4096  # at most: the first message of each link, on the first push
HEADS = 4  # of the image encoder: the tiny model has three, which two workers cannot share


@pytest.fixture(scope="module")
def halved(model_path, tmp_path_factory):
    """A tiny model with random weights whose every layer has two halves."""
    folder = tmp_path_factory.mktemp("model") / "halved"
    shutil.copytree(model_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(model_path)
    config.vision_config.num_heads = HEADS
    torch.manual_seed(5)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(halved, server_settings, dtype):
    """The server, started by its true command line: its workers are not copies of a process that has threads."""
    folder, token_file, _ = server_settings
    config = yaml.safe_load(JOB.read_text())["spec"]["config"]
    ports = free_port(), free_port()
    config["model"] |= {"model": str(halved), "torch_dtype": dtype}
    config["tuner"] = {"train_type": "lora", "use_dora": True}
    config["rlhf"] |= {"vllm_server_port": [ports[0]], "vllm_server_group_port": [ports[1]]}
    config["custom"]["extra"]["rollout_server"] |= {"vllm_tensor_parallel_size": WORKERS}
    served = launch(folder, "vllm", config, ports=ports, token=token_file, executed=True)
    try:
        wait_until_healthy(served)
        yield served
    finally:
        stop(served.process)


def test_tensor_parallel_workers_merge_like_learner(served, halved, make_sync, probe, token, dtype):
    policy = policies.adapter_of(policies.load(halved, getattr(torch, dtype)), "dora with vision")
    sync = make_sync(served, how=VllmSync(merge="server"))
    reports = [sync.push(policy, version=1)]
    policies.train_on(policy, 0.02)
    reports.append(sync.push(policy, version=2))
    assert [report.merge for report in reports] == ["server", "server"]
    for report in reports:
        sent = WORKERS * report.bytes
        assert sent <= report.wire_bytes < sent + TOKEN_BYTES
    client = ServerClient(served.base_url, token, timeout_s=60)
    assert client.world_size() == WORKERS
    policies.verify(policy, probe, [client], tolerance=policies.TOLERANCES[dtype])


def test_refused_call_leaves_workers_usable(served, token):
    client = ServerClient(served.base_url, token, timeout_s=60)
    with pytest.raises(ServerError, match="without a matching start_weight_update"):
        client.post("/finish_weight_update", "test", body={"weight_version": "3"})
    client.post("/start_weight_update", "test")
    client.post("/finish_weight_update", "test", body={"weight_version": "3"})
