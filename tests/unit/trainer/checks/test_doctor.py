"""The doctor: what a run needs is compared with what a machine has, and every lack has a way out."""

import math
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.checks.activations import pass_bytes
from stage2_trainer.checks.examination import Devices, Examination, check_images, check_order, missing_from
from stage2_trainer.checks.footprint import footprint
from stage2_trainer.checks.resources import GIB, Gpu, Machine, memory_left, total
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject
from stage2_trainer.model.policy import load_policy, trainable_parameters
from tests.unit.trainer.learner.configs import SERVER, run_config, write_box_records

pytestmark = pytest.mark.in_turns(3, apart=True)

GPU = Gpu(0, "NVIDIA H100", 80 * GIB, 0)


def machine(gpus=4, **changes):
    return replace(Machine((GPU,) * gpus, shared_memory=8 * GIB, memory=64 * GIB, driver="580.65.06"), **changes)


@pytest.fixture(scope="module", autouse=True)
def _counted_once():
    """Passes over rows are counted once for policies that are alike: each takes a second (test_activations)."""
    known = {}

    def count(policy, **rows):
        parameters = [(name, one.shape, one.dtype, one.requires_grad) for name, one in policy.named_parameters()]
        key = f"{policy} {policy.config} {parameters} {rows}"
        if key not in known:
            known[key] = pass_bytes(policy, **rows)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stage2_trainer.checks.footprint.pass_bytes", count)
        yield


@pytest.fixture
def config(tmp_path, model_path, image_paths):
    data = write_box_records(tmp_path / "train.jsonl", image_paths[0])

    def make(*, training=(), matching=(), **top):
        return run_config(
            matching={"vllm": {"mode": "server", "server": SERVER, "max_model_len": 1000}, **dict(matching)},
            training={"output_dir": str(tmp_path / "out"), "save_total_limit": 2, **dict(training)},
            **{"model": {"model": str(model_path)}, "train_jsonl": data, **top},
        )

    return make


def examine(config, *, on=None, devices=None, cpu=False):
    findings = Examination(config, on or machine(), devices, cpu).findings()
    return {finding.what: finding for finding in findings}


@pytest.mark.skipif(find_spec("vllm") is None, reason="a requirement is missing")
def test_run_with_all_requirements_met_is_good(config):
    findings = examine(config(matching={"recipe": "recommended"}), devices=Devices(3, 1, 1))
    assert {finding.verdict for finding in findings.values()} == {"good"}
    assert set(findings) >= {"records", "images", "GPUs", "model", "learner memory", "server memory", "disk"}


def test_vllm_model_runner_version_is_reported(config, monkeypatch):
    assert "model runner V2 (docs/gpu.md" in examine(config())["vLLM"].status
    assert "model runner V1," in examine(config(), cpu=True)["vLLM"].status
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "model runner V1," in examine(config())["vLLM"].status


def test_run_without_gpus_is_reported_unless_cpu_is_requested(config):
    none = machine(gpus=0)
    found = examine(config(), on=none, devices=Devices(3, 1, 1))
    assert (found["GPUs"].verdict, "--cpu" in found["GPUs"].way_out) == ("missing", True)
    assert "CUDA" in found["learner memory"].status
    on_cpu = examine(config(), on=none, devices=Devices(3, 1, 1), cpu=True)
    assert (on_cpu["GPUs"].verdict, "4 of the job stay unused" in on_cpu["GPUs"].status) == ("good", True)
    assert "activations" in on_cpu["host memory"].status
    assert not {"learner memory", "server memory"} & set(on_cpu)
    assert not any("CUDA" in finding.status for finding in on_cpu.values())


def test_recipe_that_can_run_away_is_doubtful(config):
    found = examine(config(), devices=Devices(3, 1, 1))["settings"]
    assert (found.verdict, "rollout_matching.recipe" in found.status) == ("doubtful", True)


def test_too_few_or_busy_gpus_are_reported(config):
    assert examine(config(), on=machine(gpus=2), devices=Devices(3, 1, 1))["GPUs"].verdict == "missing"
    busy = replace(machine(), gpus=(GPU, GPU, GPU, replace(GPU, index="7", used=9 * GIB)))
    one = examine(config(), on=busy, devices=Devices(3, 1, 1))["GPUs"]
    assert one.verdict == "doubtful"
    assert "in use: 7" in one.status


def test_config_and_record_problems_are_reported_with_advice(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    findings = examine(config(training={"report_to": ["wandb"]}, train_jsonl=str(tmp_path / "lost.jsonl")))
    assert "wandb" in findings["configuration"].status
    assert "pip install" in findings["configuration"].way_out
    assert findings["records"].verdict == "missing"


def test_missing_model_folder_is_reported(config, tmp_path):
    found = examine(config(model={"model": str(tmp_path / "lost")}))["model"]
    assert "there is no such folder" in found.status
    assert "train stage 1 first" in found.way_out


def test_too_little_gpu_memory_is_reported(config):
    small = replace(machine(), gpus=(replace(GPU, total=2 * GIB),))
    findings = examine(config(), on=small)
    assert findings["learner memory"].verdict == "doubtful"
    assert findings["server memory"].verdict == "missing"


def test_server_memory_reports_bytes_read_by_server_merge(config):
    assert "a merge reads" in examine(config())["server memory"].status
    at_learner = {"vllm": {"mode": "server", "server": SERVER, "max_model_len": 1000, "sync": {"merge": "learner"}}}
    for other in (config(matching=at_learner), config(tuner={"train_type": "full"})):
        assert "a merge reads" not in examine(other)["server memory"].status


def test_little_shared_memory_and_unlimited_checkpoints_are_doubtful(config):
    findings = examine(config(training={"save_total_limit": None}), on=machine(shared_memory=2**26))
    assert findings["shared memory"].verdict == "doubtful"
    assert findings["disk"].verdict == "doubtful"


def test_too_small_disk_is_reported(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 10))
    assert examine(config())["disk"].verdict == "missing"


def test_best_checkpoint_needs_disk_space_beside_newest(config, monkeypatch):
    run = config(training={"save_total_limit": 1})
    takes = footprint(run, run.model.model, row_tokens=100).checkpoint
    room = int(3.5 * takes)  # for the newest, the newest that is proved, and the one that is being written
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(room, 0, room))
    assert examine(run)["disk"].verdict == "good"
    evaluated = config(training={"save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2})
    assert examine(evaluated)["disk"].verdict == "missing"


def test_existing_checkpoints_count_as_available_disk_space(config, monkeypatch, tmp_path):
    run = config()
    takes = footprint(run, run.model.model, row_tokens=100).checkpoint
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(takes, 0, takes))
    assert examine(run)["disk"].verdict == "missing"
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7" / "weights").write_bytes(bytes(2 * takes))
    assert examine(run)["disk"].verdict == "good", "a run that goes on replaces them"


def test_disk_estimate_counts_only_checkpoints_that_run_saves(config, monkeypatch):
    short = {"save_total_limit": 20, "max_steps": 60, "save_steps": 30}
    run, bare = config(training=short), config(training=short | {"save_only_model": True})
    takes, less = (footprint(one, one.model.model, row_tokens=100).checkpoint for one in (run, bare))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(4 * takes, 0, 4 * takes))
    assert examine(run)["disk"].verdict == "good"
    assert less < takes


def test_unlimited_checkpoints_do_not_replace_existing_ones(config, monkeypatch, tmp_path):
    run = config(training={"save_total_limit": None})
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7" / "weights").write_bytes(bytes(10**6))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    assert examine(run)["disk"].verdict == "missing"


SFT = {"trainer_variant": "sft"}
COLOCATE = {"vllm": {"mode": "colocate", "max_model_len": 1000}}


@pytest.mark.parametrize(
    ("matching", "custom", "pushed"),
    [({}, {}, True), ({"rollout_backend": "hf"}, {}, False), (COLOCATE, {}, False), ({}, SFT, False)],
    ids=["servers", "hf", "colocate", "stage 1"],
)
def test_only_run_that_pushes_weights_needs_push_buckets(config, model_path, matching, custom, pushed):
    run = config(matching=matching)
    run = run.model_copy(update={"custom": run.custom.model_copy(update=custom)})
    needs = footprint(run, str(model_path), row_tokens=100)
    assert bool({part.name: part.nbytes for part in needs.learner}["buckets of a push"]) == pushed


def test_offloaded_tensors_must_fit_host_memory(config):
    matching = {
        "vllm": {"mode": "colocate", "max_model_len": 1000},
        "offload": {"enabled": True, "offload_model": True},
    }
    assert examine(config(matching=matching))["host memory"].verdict == "good"
    little = examine(config(matching=matching), on=machine(memory=2**20))["host memory"]
    assert little.verdict == "doubtful"
    assert "weights" in little.status
    assert examine(config(), on=machine(memory=2**20))["host memory"].verdict == "good", "nothing of it is there"
    assert examine(config(), on=machine(gpus=0, memory=2**20))["host memory"].verdict == "doubtful", (
        "all of it is there"
    )


@pytest.mark.parametrize(
    ("matching", "devices", "engines"),
    [({}, Devices(3, 0, 0), 3), ({}, None, 1), (COLOCATE, None, 1), ({"rollout_backend": "hf"}, None, 0)],
    ids=["a job's servers", "servers of this host", "colocated", "hf"],
)
def test_cpu_engines_on_this_host_count_towards_host_memory(config, matching, devices, engines):
    run = config(matching=matching)
    rows = Examination(run, machine()).row_tokens
    alone = total(footprint(run, run.model.model, row_tokens=rows).learner)
    finding = examine(run, on=machine(gpus=0), devices=devices, cpu=True)["host memory"]
    assert (f"vLLM ({engines} x " in finding.status) == bool(engines)
    tight, roomy = (machine(gpus=0, memory=alone + each * GIB * engines) for each in (3, 5))
    less = examine(run, on=tight, devices=devices, cpu=True)["host memory"]
    enough = examine(run, on=roomy, devices=devices, cpu=True)["host memory"]
    assert (less.verdict, enough.verdict) == ("doubtful" if engines else "good", "good")


@pytest.mark.parametrize(
    "tuner", [{"train_type": "lora"}, {"train_type": "lora", "use_dora": True, "freeze_aligner": False}]
)
def test_memory_footprint_equals_that_of_loaded_model(config, model_path, tuner):
    run = config(tuner=tuner)
    policy = load_policy(run)
    needs = footprint(run, str(model_path), row_tokens=100)
    assert needs.trained == trainable_parameters(policy)
    frozen = [one for name, one in policy.named_parameters() if "lora_" not in name]
    weights = {part.name: part.nbytes for part in needs.learner}["weights"]
    assert weights == sum(one.numel() * one.element_size() for one in frozen)
    assert needs.cache_token == 2 * 4 * 2 * 32 * 2  # keys and values, layers, heads, width, bfloat16
    assert total(needs.learner) > weights


def test_offloaded_bytes_are_each_tensor_rounded_up_to_power_of_two(config, model_path):
    everything = {"enabled": True, "offload_model": True, "offload_optimizer": True}
    run = config(tuner={"train_type": "lora"}, matching={**COLOCATE, "offload": everything})
    policy = load_policy(run)
    sizes = {part.name: part.nbytes for part in footprint(run, str(model_path), row_tokens=100).offloaded}
    assert sizes["weights"] == sum(2 ** math.ceil(math.log2(one.nbytes)) for one in policy.parameters())
    moments = [8 * one.numel() for one in policy.parameters() if one.requires_grad]
    assert sizes["optimizer"] == sum(2 ** math.ceil(math.log2(one)) for one in moments)


@pytest.mark.parametrize(
    ("moved", "beside_push", "beside_answers"),
    [
        ((), {"weights": 2, "adapters": 1, "optimizer": 1}, {"weights": 1, "adapters": 1, "optimizer": 1}),
        (("offload_model",), {"weights": 2, "adapters": 1, "optimizer": 1}, {"optimizer": 1}),
        (("offload_optimizer",), {"weights": 2, "adapters": 1}, {"weights": 1, "adapters": 1}),
        (("offload_model", "offload_optimizer"), {"weights": 2, "adapters": 1}, {}),
    ],
)
def test_shared_gpu_holds_both_models_during_push_and_unoffloaded_parts_during_generation(
    config, model_path, moved, beside_push, beside_answers
):
    offload = {"enabled": bool(moved), **dict.fromkeys(moved, True)}
    run = config(tuner={"train_type": "lora"}, matching={**COLOCATE, "offload": offload})
    needs = footprint(run, str(model_path), row_tokens=100)
    part = {one.name: one.nbytes for one in needs.learner}
    assert needs.beside_push == sum(times * part[name] for name, times in beside_push.items())
    assert needs.beside_answers == sum(times * part[name] for name, times in beside_answers.items())


def test_peak_memory_of_gpu_shared_by_learner_and_engine_is_checked(config, model_path):
    def shared(gib, *, offload=False, utilization=0.5, **vllm):
        everything = {"enabled": offload, "offload_model": offload, "offload_optimizer": offload}
        asked = {**COLOCATE["vllm"], "gpu_memory_utilization": utilization, **vllm}
        run = config(matching={"vllm": asked, "offload": everything})
        return examine(run, on=replace(machine(), gpus=(replace(GPU, total=int(gib * GIB)),)))

    assert "GPU shared with vLLM" not in shared(80), "it is always there, and counted beside all of training"
    assert shared(80, sleep_level=1)["GPU shared with vLLM"].verdict == "good"
    weights = {one.name: one.nbytes for one in footprint(config(), str(model_path), row_tokens=100).learner}["weights"]
    tight = 2 + weights / GIB  # for the engine's half, CUDA, and less than the learner's weights and optimizer
    found = shared(tight, sleep_level=2)["GPU shared with vLLM"]
    assert (found.verdict, "offload_model" in found.way_out) == ("doubtful", True)
    assert shared(tight, sleep_level=2, offload=True)["GPU shared with vLLM"].verdict == "good"
    assert shared(1 + weights / GIB, sleep_level=2, offload=True)["GPU shared with vLLM"].verdict == "doubtful"


def test_weights_of_sleeping_engine_count_as_host_memory(config, model_path):
    def kept(level):
        run = config(matching={"vllm": {**COLOCATE["vllm"], "sleep_level": level}})
        needs = footprint(run, str(model_path), row_tokens=100)
        return total(needs.offloaded), {one.name: one.nbytes for one in needs.learner}["weights"]

    assert [kept(level)[0] for level in (0, 2)] == [0, 0]
    assert kept(1)[0] == kept(1)[1]


def test_detected_gpus_report_memory_used_by_other_processes(monkeypatch):
    free = {0: 79 * GIB, 1: 9 * GIB}

    def mem_get_info(index):
        if index not in free:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return free[index], 80 * GIB

    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    found = Machine.detect()
    assert [(gpu.index, gpu.used // GIB) for gpu in found.gpus] == [(0, 0), (1, 70), (2, 79)]
    assert found.smallest_gpu == 80 * GIB


def test_machine_without_gpus_has_no_smallest_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Machine.detect().smallest_gpu is None


def test_objects_without_consistent_order_are_doubtful():
    def records(flip):
        boxes = [GTObject("cat", "bbox", (0, 10 * row, 9, 10 * row + 9)) for row in range(60)]
        return [Record(0, "x", (), 9, 9, tuple(boxes[::-1] if flip else boxes))]

    assert check_order(records(flip=False)).verdict == "good"
    found = check_order([*records(flip=False), *records(flip=True)])
    assert (found.verdict, "none" in found.status, "stage2 import" in found.way_out) == ("doubtful", True, True)


def test_image_check_reports_record_with_broken_header(tmp_path):
    path = tmp_path / "scene.png"
    Image.new("RGB", (40, 20)).save(path)
    record = Record(0, "scene-7", (str(path),), 40, 20)
    assert check_images([record]).verdict == "good"
    path.write_bytes(path.read_bytes()[:10])
    broken = check_images([record])
    assert broken.verdict == "missing"
    assert record.sample_id in broken.status


def test_container_memory_is_what_its_cgroup_limit_leaves(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert memory_left(meminfo, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory_left(meminfo, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory_left(meminfo, tmp_path) == 4000


@pytest.mark.parametrize("value", [None, 3, "x" * 10_000])
def test_config_error_becomes_short_finding_with_same_words(value):
    problem = Problem("a.b", value, "must be true", "write it")
    (missing,) = missing_from("data", ConfigError([problem]))
    assert (missing.what, missing.verdict) == ("data", "missing")
    assert f"{missing.status}; {missing.way_out}" == str(problem)
    assert len(missing.status) < 200
