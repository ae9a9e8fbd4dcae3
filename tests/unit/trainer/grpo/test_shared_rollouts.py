"""The rollout server of a GRPO run, as it is started."""

import itertools
import json

import pytest

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_run_config
from stage2_trainer.serve import launch
from stage2_trainer.serve.server_command import Endpoint, vllm_command
from tests.unit.api.grpo_configs import GOOD, server
from tests.unit.api.wrong_jobs import merge_patch


def run(**changes):
    return parse_run_config(merge_patch(GOOD, server(**changes)))


def command(**changes):
    return vllm_command(run(**changes), Endpoint("127.0.0.1", 8080), "cuda")


def test_six_data_parallel_replicas_start_as_single_server():
    words = command(vllm_max_num_seqs=64, vllm_limit_mm_per_prompt={"image": 1})
    found = dict(itertools.pairwise(words))
    assert (found["--data-parallel-size"], found["--tensor-parallel-size"]) == ("6", "1")
    assert (found["--port"], found["--max-model-len"], found["--max-num-seqs"]) == ("8080", "8192", "64")
    assert found["--gpu-memory-utilization"] == "0.6"
    assert json.loads(found["--limit-mm-per-prompt"]) == {"image": 1}
    assert "--no-enable-lora" in words


def test_additional_engine_arguments_are_passed_to_vllm():
    words = command(vllm_engine_kwargs={"kv_cache_dtype": "fp8"}, vllm_mm_processor_cache_gb=2.0)
    found = dict(itertools.pairwise(words))
    assert (found["--kv-cache-dtype"], found["--mm-processor-cache-gb"]) == ("fp8", "2.0")


@pytest.mark.parametrize(("visible", "fits"), [("0,1,2,3,4,5", True), ("0,1", False), ("", False)])
def test_server_with_wrong_number_of_visible_gpus_is_refused(monkeypatch, visible, fits):
    monkeypatch.setattr(launch, "installed_platform", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    endpoint = Endpoint("127.0.0.1", 8080)
    if fits:
        assert "--data-parallel-size" in launch.server_process(run(), 0, endpoint, "vllm")[0]
        return
    with pytest.raises(ConfigError, match="which is 6"):
        launch.server_process(run(), 0, endpoint, "vllm")
