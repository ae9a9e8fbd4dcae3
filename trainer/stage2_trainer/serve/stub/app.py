"""The CPU stub: a second, quick rollout server with vLLM's routes, for tests and rehearsals.

It generates with transformers, takes the same weight push, and is held to the same contract tests as vLLM
(tests/integration/test_server_contract.py). `stage2 serve CONFIG --server I --engine stub` runs it, or

    python -m stage2_trainer.serve.stub.app --model DIR --port 8000
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial

import torch
import uvicorn

from stage2_api.vllm import Transport
from stage2_trainer.serve.stub.chat_server import ChatServer
from stage2_trainer.serve.stub.routes import Stub, build_app
from stage2_trainer.serve.stub.stub_model import StubModel
from stage2_trainer.serve.stub.weight_updates import WeightUpdates
from stage2_trainer.sync.transports.nccl import nccl_communicator
from stage2_trainer.sync.transports.nccl_group import Communicator
from stage2_trainer.sync.transports.nccl_server import open_nccl
from stage2_trainer.sync.transports.receiver import Receiver
from stage2_trainer.sync.transports.tcp_server import open_tcp
from stage2_trainer.wire.token import read_token


def receiver(
    transport: Transport,
    device: torch.device | None = None,
    communicator: Callable[[torch.device], Communicator] = nccl_communicator,
) -> Receiver:
    """Return what takes part in pushes over a transport.

    device, communicator: where buckets arrive over NCCL (None = this process's GPU), and what a group speaks with.
    """
    if transport == "tcp":
        return Receiver("tcp", open_tcp)
    place = device or torch.device("cuda", torch.cuda.current_device())
    return Receiver("nccl", partial(open_nccl, device=place, communicator=communicator))


def main(receiver_over: Callable[[Transport], Receiver] = receiver) -> None:
    """Serve until terminated."""
    args = _arguments()
    read_token(os.environ)  # a missing token shall be said before anything is loaded
    model = StubModel(
        args.model,
        dtype=args.dtype,
        dummy=args.load_format == "dummy",
        processor_options=args.mm_processor_kwargs,
    )
    stub = Stub(
        model,
        ChatServer(model, max_model_len=args.max_model_len),
        WeightUpdates(
            model,
            args.model,
            receiver_over(args.transport),
            max_lora_rank=args.max_lora_rank if args.enable_lora else None,
        ),
        root=args.model,
    )
    tls = {"ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}
    uvicorn.run(build_app(stub), host=args.host, port=args.port, log_level="warning", **tls)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ssl-certfile", help="answer over TLS with this certificate")
    parser.add_argument("--ssl-keyfile", help="its private key")
    parser.add_argument("--dtype", default="auto", help="torch dtype name, or auto: the checkpoint's")
    parser.add_argument("--max-model-len", type=int, default=4096, help="prompt + answer, tokens")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights")
    parser.add_argument("--mm-processor-kwargs", type=json.loads, default={}, help="JSON: min_pixels, max_pixels")
    parser.add_argument("--transport", choices=["tcp", "nccl"], default="tcp", help="what weights come over")
    parser.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
