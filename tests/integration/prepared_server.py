"""`stage2 serve`, in a process that can be struck in the middle of a merge, and receives over NCCL without a GPU.

    python -m tests.integration.prepared_server serve CONFIG --server 0 --engine ENGINE

A file beside CONFIG orders a blow (`strikes.order_blow`): the signal's number, and whom it strikes. Another one,
`CONFIG.lost`, has a part of the names of tensors that vLLM is never given, though they arrive.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from stage2_cli.main import main
from stage2_trainer.serve import launch, server_command
from stage2_trainer.sync.vllm import routes
from stage2_trainer.sync.vllm.server_merge import ServerMerge
from stage2_trainer.sync.vllm.vllm_compat import LayerReload
from tests.support.socket_communicator import SocketCommunicator

BLOW_VARIABLE = "STAGE2_TEST_BLOW"
MADE_BEFORE = 3  # tensors: some layers are loaded then, one perhaps half
LOADING_S = 1.0  # after its deadline a call that does not end is soon called stuck


def _take_blow() -> None:
    file = Path(os.environ[BLOW_VARIABLE])
    if file.exists():
        blow, who = file.read_text().split()
        file.unlink()
        if who == "engine":
            os.kill(os.getpid(), int(blow))
        else:
            os.killpg(os.getpgrp(), int(blow))


def _strike_in_merges() -> None:
    honest = ServerMerge._merged

    def merged(self: ServerMerge, *what: Any) -> Iterator[tuple[str, Tensor]]:
        for number, tensor in enumerate(honest(self, *what)):
            if number == MADE_BEFORE:
                _take_blow()
            yield tensor

    ServerMerge._merged = merged  # type: ignore[method-assign]


def _lose_tensors() -> None:
    honest = LayerReload.load

    def load(self: LayerReload, tensors: Iterable[tuple[str, Tensor]]) -> None:
        file = Path(os.environ[BLOW_VARIABLE]).with_suffix(".lost")
        lost = file.read_text() if file.exists() else "no name"
        honest(self, (pair for pair in tensors if lost not in pair[0]))

    LayerReload.load = load  # type: ignore[method-assign]


def _do_without_a_gpu(engine: str) -> None:
    """Let a server whose configuration says nccl receive over sockets; vLLM's build for CPUs would be refused."""
    server_command.STUB_MODULE = "tests.integration.nccl_stub"
    if engine == "vllm":
        from stage2_trainer.sync.transports import nccl

        nccl.NcclCommunicator = SocketCommunicator  # type: ignore[misc, assignment]
        launch._require_transport = lambda *_: None


if __name__ == "__main__":
    os.environ[BLOW_VARIABLE] = str(Path(sys.argv[2]).with_suffix(".blow"))
    routes.LOADING_S = LOADING_S
    _strike_in_merges()
    _lose_tensors()
    _do_without_a_gpu(sys.argv[-1])
    main()
