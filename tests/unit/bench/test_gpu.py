"""The benchmark of a GPU runs to its end on a CPU at tiny sizes, and says at once where there is no GPU."""

import re
from types import SimpleNamespace

import pytest
import torch
from bench import gpu, gpu_push
from bench.__main__ import main
from bench.gpu import AN_8B, GIB, TINY

from stage2_api.errors import EXIT_CONFIG

pytestmark = pytest.mark.in_turns(3, first=2)

TABLES = gpu.tables(TINY)
ROWS = {
    "Merging an adapter": 4,  # LoRA and DoRA of each shape
    "Packing buckets": 2,
    "Loss: time of a forward and backward pass": 3,
    "Loss: memory of a forward and backward pass": 3,
    "Offload to main memory": 1,
    "A push to another process": 1,
}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_missing_gpu_is_reported(no_gpu, capsys):
    assert main(["gpu"]) == EXIT_CONFIG
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "table", [one for name in TABLES if name != "look" for one in TABLES[name]], ids=lambda table: table.title
)
def test_gpu_tables_have_expected_rows(table, monkeypatch):
    monkeypatch.setattr(gpu, "installed", lambda module: None)  # their kernels are Triton's
    rows = list(table.rows())
    assert len(rows) == ROWS[table.title]
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)
    counts = [re.match(r"(\d+) (?:weights|tensors) differ", row.difference) for row in rows]
    assert all(int(found[1]) == 0 for found in counts if found)


def test_loss_variant_that_runs_out_of_memory_is_reported(monkeypatch):
    def too_large(case):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu, "loss_forms", lambda *, coords: {"everything": too_large})
    (row, _) = gpu.loss_rows(TINY, gpu.seconds)
    assert (row.theirs, row.difference) == (float("inf"), "out of memory")


def test_push_with_wrong_received_weights_raises(monkeypatch):
    monkeypatch.setattr(gpu_push, "sum_of", lambda tensor: 7.0)  # in this process alone
    with pytest.raises(RuntimeError, match="other weights arrived"):
        gpu_push.seconds("tcp", gpu.tensors(TINY), TINY.device, TINY.bucket)


def test_look_table_names_machine_and_versions():
    vllm = pytest.importorskip("vllm", reason="NCCL is called by vLLM's wrapper")
    (table,) = TABLES["look"]
    found = "".join(table.lines())
    assert "| GPU | not used |" in found
    assert f"torch {torch.__version__.partition('+')[0]}" in found
    assert f"vllm {vllm.__version__.partition('+')[0]}" in found, "the build for CPUs too"
    assert "| NCCL | 2." in found
    assert "packed, sequence by sequence" in found


def test_push_is_reported_before_next_transport_is_tried(monkeypatch):
    def seconds(transport, *_):
        assert transport == "nccl", "cut off"
        return 2.0

    monkeypatch.setattr(gpu, "transports", lambda where: ("nccl", "tcp"))
    monkeypatch.setattr(gpu_push, "seconds", seconds)
    row = next(gpu.push_rows(TINY))
    assert (row.ours, row.peer[:9]) == (2.0, "over nccl")


def test_look_names_driver_without_nvidia_smi(monkeypatch):
    found = SimpleNamespace(name="H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(gpu, "loaded_driver", lambda: "580.95.05")
    monkeypatch.setenv("PATH", "")  # containers have it only with the driver's capability `utility`
    assert next(gpu.looks(AN_8B)) == ("GPU", "H200, capability 9.0, driver 580.95.05")
