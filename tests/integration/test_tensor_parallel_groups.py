"""Requests of a tensor-parallel group, gathered and divided again by real processes over gloo."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from torch import distributed

from stage2_trainer.rollouts.colocate import TensorParallel
from tests.integration.runs import free_ports

WORLD = 4
COUNTS = (2, 0, 1, 3)


def member(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    mine = [f"{rank}.{i}" for i in range(COUNTS[rank])]
    everyone, own = TensorParallel(2).together(mine)
    torch.save((mine, everyone, everyone[own]), f"{folder}/{rank}")
    distributed.destroy_process_group()


@pytest.mark.timeout(120)
def test_every_member_sees_its_whole_group_and_keeps_its_own(tmp_path):
    # one process imports torch, and the four are its copies
    multiprocessing.set_forkserver_preload(["torch", "stage2_trainer.rollouts.colocate"])
    arguments = (free_ports(1), str(tmp_path))
    torch.multiprocessing.start_processes(member, arguments, nprocs=WORLD, start_method="forkserver")
    found = [torch.load(tmp_path / str(rank)) for rank in range(WORLD)]
    assert all(mine == kept for mine, _, kept in found)
    assert found[0][1] == found[1][1] == ["0.0", "0.1"]
    assert found[2][1] == found[3][1] == ["2.0", "3.0", "3.1", "3.2"]
