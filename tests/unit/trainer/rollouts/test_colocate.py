"""A colocated engine: what the configuration makes of it, whose requests it answers, and when it must prove itself."""

from __future__ import annotations

import pytest
import torch

from stage2_trainer.process.transformers_compat import disable_cache
from stage2_trainer.rollouts.build import engine_environment, engine_options
from stage2_trainer.rollouts.colocate import EngineProver, TensorParallel, groups, own_slice
from stage2_trainer.sync.fleet.proof import Probe, learner_logprobs
from stage2_trainer.sync.fleet.report import ProofError
from tests.unit.trainer.learner.configs import run_config

COLOCATE = {"mode": "colocate", "max_model_len": 1024}


def options(*, world_size=1, on_cpu=True, **vllm):
    config = run_config(matching={"vllm": {**COLOCATE, **vllm}}, template={"max_pixels": 9216})
    return engine_options(config, world_size=world_size, on_cpu=on_cpu)


def test_the_defaults_are_careful_with_a_shared_gpu():
    found = options(on_cpu=False)
    assert found["gpu_memory_utilization"] == 0.45
    assert found["load_format"] == "dummy"
    assert found["enable_prefix_caching"] is True
    assert found["enable_sleep_mode"] is False
    assert found["tensor_parallel_size"] == 1
    assert "distributed_executor_backend" not in found


def test_four_processes_share_one_engine_unless_told_otherwise():
    assert options(world_size=4)["tensor_parallel_size"] == 4
    assert options(world_size=4, tensor_parallel_size=2)["tensor_parallel_size"] == 2
    assert options(world_size=8)["tensor_parallel_size"] == 1
    assert options(world_size=4)["distributed_executor_backend"] == "external_launcher"


def test_a_dummy_start_leaves_no_random_values_in_the_image_normalization():
    assert options()["mm_device_do_normalize"] is False
    assert "mm_device_do_normalize" not in options(load_format="auto")


def test_image_limits_and_settings_of_a_person_reach_the_engine():
    found = options(max_num_batched_tokens=64, limit_mm_per_prompt={"image": 2}, swap_space=1.0)
    assert found["mm_processor_kwargs"] == {"max_pixels": 9216}
    assert (found["max_num_batched_tokens"], found["limit_mm_per_prompt"]) == (64, {"image": 2})
    assert "swap_space" not in found


def test_nothing_of_packing_reaches_the_engine():
    packed = run_config(
        matching={"vllm": COLOCATE}, training={"packing": True}, global_max_length=512, template={"max_pixels": 9216}
    )
    assert engine_options(packed, world_size=1, on_cpu=True) == options()


def test_an_engine_on_a_cpu_stays_in_this_process():
    assert engine_environment(on_cpu=True, eager=True)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_an_eager_engine_on_a_cpu_compiles_nothing():
    assert engine_environment(on_cpu=True, eager=True)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(on_cpu=True, eager=False)
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(on_cpu=False, eager=True)


def test_an_engine_on_a_gpu_compiles_nothing_with_nvcc():
    assert engine_environment(on_cpu=False, eager=True)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine_environment(on_cpu=True, eager=True)


def test_neighbours_form_groups():
    assert groups(4, 1) == [[0], [1], [2], [3]]
    assert groups(8, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("counts", [[3], [2, 0, 3], [0, 0], [1, 4]])
def test_the_slices_of_all_members_are_everything_once(counts):
    everything = list(range(sum(counts)))
    parts = [everything[own_slice(counts, place)] for place in range(len(counts))]
    assert [len(part) for part in parts] == counts
    assert [item for part in parts for item in part] == everything


def test_a_group_of_one_asks_nobody():
    assert TensorParallel(1).together(["a", "b"]) == (["a", "b"], slice(0, 2))


@pytest.fixture
def probe(model, encoder, chats):
    disable_cache(model)
    prompt = encoder.prompt(chats[0])
    inputs = {
        "input_ids": prompt.input_ids[None],
        "mm_token_type_ids": prompt.mm_token_type_ids[None],
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
    }
    return Probe(messages=chats[0], inputs=inputs)


def test_an_engine_that_holds_other_weights_is_found_out(model, probe):
    def right(asked):
        return learner_logprobs(model, asked.inputs)

    def wrong(asked):
        return right(asked) + 0.01

    EngineProver(probe, every=1).after_sync(model, right, step=1)
    with pytest.raises(ProofError, match=r"differ from the learner.s by 0\.01 in the mean"):
        EngineProver(probe, every=1).after_sync(model, wrong, step=1)
    with pytest.raises(ProofError):
        EngineProver(probe, every=1).after_sync(model, lambda asked: right(asked) * torch.nan, step=1)
