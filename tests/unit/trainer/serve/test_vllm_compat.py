"""The workarounds for vLLM that need no vLLM to run."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stage2_trainer.sync.vllm import vllm_compat
from stage2_trainer.sync.vllm.vllm_compat import offer_model_inspections

NAME = "vllm-model.json"


def test_only_shared_memory_segments_of_own_group_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_compat, "SHARED_MEMORY", tmp_path)
    own = ["-tp:0-[0-1]-cpushm_0", "-tp:0-[0-1]-cpushm_1"]
    others = ["-tp:0-[2-3]-cpushm_0", "51216-tp:0-[0-1]-cpushm_0", "psm_1"]
    for name in (*own, *others):
        (tmp_path / name).touch()
    vllm_compat.free_shared_memory([0, 1])
    vllm_compat.free_shared_memory([0, 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def _kept(folder: Path) -> Path:
    folder.mkdir()
    (folder / NAME).write_text("the image's")
    return folder


def test_model_inspection_from_image_is_placed_in_vllm_cache(tmp_path):
    kept, root = _kept(tmp_path / "kept"), tmp_path / "root"
    for _ in range(2):
        offer_model_inspections(kept, root)
    assert (root / "modelinfos" / NAME).read_text() == "the image's"


def test_existing_model_inspection_of_server_is_not_replaced(tmp_path):
    kept, root = _kept(tmp_path / "kept"), tmp_path / "root"
    own = root / "modelinfos" / NAME
    own.parent.mkdir(parents=True)
    own.write_text("its own")
    offer_model_inspections(kept, root)
    assert own.read_text() == "its own"
    assert not own.is_symlink()


def test_each_draft_token_uses_sampling_settings_of_its_request():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in (torch.tensor([0.7, 0.5, 0.0]), torch.tensor([4, 9, 0], dtype=torch.int32)):
        expanded = torch.full((5,), 99, dtype=values.dtype)
        vllm_compat._expand(expanded, values, ends, 0, 1)
        assert expanded.tolist() == [values[0]] * 2 + [1] * 3


def test_forked_server_process_releases_port_and_keeps_thread_count(monkeypatch):
    monkeypatch.setattr(vllm_compat._Copy, "threads", torch.get_num_threads())
    inside, outside = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as port, inside, outside:
        copy = vllm_compat._copying().Process(target=_report, args=(port.fileno(), inside.fileno()))
        copy.start()
        copy.join(20)
        assert copy.exitcode == 0
        port.getsockname()  # it is the server's own still


def _report(port: int, other: int) -> None:
    os.fstat(other)  # only ports are closed
    try:
        os.fstat(port)
    except OSError:
        sys.exit(torch.get_num_threads() - vllm_compat._Copy.threads)
    sys.exit(99)


def test_model_runner_v2_uses_frame_speculator_only_for_frames(monkeypatch):
    spec_decode = pytest.importorskip("vllm.v1.worker.gpu.spec_decode")

    def taken(vllm_config, device, req_states):
        return vllm_config.speculative_config.method

    monkeypatch.setattr(spec_decode, "init_speculator", taken)
    for _ in range(2):
        vllm_compat.draft_frames_on_gpus(lambda *_: "ours")
    drafts = {"method": "ngram_gpu", "prompt_lookup_min": 2}
    for longest, wanted in ((48, "ours"), (8, "ngram_gpu")):
        config = SimpleNamespace(speculative_config=SimpleNamespace(**drafts, prompt_lookup_max=longest))
        assert spec_decode.init_speculator(config, None, None) == wanted


def test_pinned_vllm_calls_speculator_with_expected_arguments():
    assert vllm_compat._changed_signatures() == []
