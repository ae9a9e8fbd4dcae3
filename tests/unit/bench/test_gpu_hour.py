"""The run of `hack/gpu-hour`: its configuration is valid, it fits its GPU, and another run than was asked for fails."""

import pytest
import torch
from bench import gpu_hour
from bench.gpu_hour import FULL, MERGED_AT, TINY

from stage2_api.parsing import parse_run_config
from stage2_trainer.checks.footprint import footprint
from stage2_trainer.checks.resources import CONTEXT_BYTES, total

pytestmark = pytest.mark.in_turns(3, first=2)

ITS_GPU = 141e9
PROCESSES = 3  # that hold a context: server, learner, and the one that made the model


@pytest.mark.parametrize("transport", MERGED_AT)
@pytest.mark.parametrize("size", [FULL, TINY], ids=["full", "tiny"])
def test_config_is_valid(size, transport, tmp_path):
    config = parse_run_config(gpu_hour.configuration(tmp_path, size, transport))
    assert config.rollout_matching.vllm.sync.transport == transport


def test_learner_and_server_of_4b_model_fit_single_gpu(tmp_path):
    gpu_hour.make_shape(tmp_path / "model", FULL.text, FULL.vision, FULL.side)
    config = parse_run_config(gpu_hour.configuration(tmp_path, FULL, "nccl"))
    found = footprint(config, str(tmp_path / "model"), row_tokens=FULL.row)
    assert 4.2e9 < found.server[0].nbytes / torch.bfloat16.itemsize < 4.6e9
    server = FULL.engine["gpu_memory_utilization"] * ITS_GPU
    assert total(found.learner) + server + PROCESSES * CONTEXT_BYTES < 0.9 * ITS_GPU


def test_steps_with_unexpected_transport_raise():
    step = {
        "step/wall_s": 1.0, "time/rollout_generate_s": 1.0, "rollout/gen_tokens_per_s": 1.0, "time/forward_s": 1.0,
        "packing/post_rollout_fill": 1.0, "loss": 1.0, "sync/bytes": 1.0, "sync/seconds": 1.0, "memory/peak_bytes": 1.0,
        "sync/gigabytes_per_second": 1.0, "sync/proof_gap": 1.0, "sync/merge": "learner",
    }  # fmt: skip
    steps = [{**step, "step": number, "sync/transport": "nccl"} for number in range(1, gpu_hour.STEPS + 1)]
    assert len(list(gpu_hour.step_table(steps, "nccl"))) == 2 + len(steps)
    for wrong in (steps[1:], [*steps[:-1], {**steps[-1], "sync/transport": "tcp"}]):
        with pytest.raises(RuntimeError, match="steps, transports and mergers are"):
            list(gpu_hour.step_table(wrong, "nccl"))


def test_run_without_nvidia_smi_has_no_samples_of_memory(monkeypatch):
    monkeypatch.setenv("PATH", "")  # containers have it only with the driver's capability `utility`
    with gpu_hour._memory_sampled(True) as samples:
        pass
    assert samples == []
