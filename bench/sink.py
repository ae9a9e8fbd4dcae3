"""A rollout server for benchmarks of the push: the CPU stub's routes, and tensors in memory instead of a model.

    python -m bench.sink PORT MODEL HOST

MODEL: the folder that merges at the server read. HOST: the address that it listens on.

Beside the stub's routes: POST /raw receives gloo broadcasts and drops or copies them, POST
/raw-sealed opens and copies them, POST /reload reads a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from bench import raw_gloo
from fastapi import Body
from fastapi.concurrency import run_in_threadpool
from safetensors.torch import load_file

from stage2_trainer.serve.stub.app import WeightUpdates, build_app
from stage2_trainer.serve.stub.chat import ChatServer
from stage2_trainer.sync.transports.receiver import Receiver


class Sink:
    """A stand-in for the stub's model, which copies every tensor."""

    adapters: tuple[str, ...] = ()
    processor = None

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors over those of the same names, as a model does."""
        for name, tensor in tensors:
            if name in self._tensors:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = tensor.clone()

    def copy_in(self, number: int, buffer: torch.Tensor) -> None:
        """Copy a buffer over the one of the same number."""
        self.load_weights([(f"{number} of {len(buffer)} bytes", buffer)])

    def abort(self) -> None:
        """Do nothing: nothing is generated."""


def main(port: int, model: str, host: str) -> None:
    """Serve until terminated."""
    torch.set_num_threads(1)
    sink: Any = Sink()
    updates = WeightUpdates(sink, model, Receiver("tcp", torch.device("cpu")), max_lora_rank=None)
    groups: list[Any] = []
    app = build_app(ChatServer(sink, max_model_len=1), updates, model)

    @app.post("/raw/join")
    async def join(port: Annotated[int, Body()]) -> dict[str, bool]:
        groups[:] = [await run_in_threadpool(raw_gloo.group, port, 1)]
        return {"done": True}

    @app.post("/raw")
    async def receive(sizes: Annotated[list[int], Body()], load: Annotated[bool, Body()]) -> dict[str, bool]:
        await run_in_threadpool(raw_gloo.broadcast, groups, sizes, sink.copy_in if load else None)
        return {"done": True}

    @app.post("/raw-sealed")
    async def receive_sealed(sizes: Annotated[list[int], Body()], rank: Annotated[int, Body()]) -> dict[str, bool]:
        await run_in_threadpool(raw_gloo.receive_sealed, groups[0], rank, sizes, sink.copy_in)
        return {"done": True}

    @app.post("/reload")
    async def reload(path: str = Body(embed=True)) -> dict[str, bool]:
        await run_in_threadpool(lambda: sink.load_weights(list(load_file(Path(path)).items())))
        return {"done": True}

    uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
