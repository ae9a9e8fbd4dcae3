"""All routes of a rollout server's app, mounts, websockets and those that no schema names included.

The app is built as the server builds it, for all kinds of work that it knows, and without an engine behind it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import forked

ANYTHING = "GET"  # of a mount, whose own routes nobody knows


class Route(NamedTuple):
    """A route: what asks for it (a method, or WEBSOCKET), and a path in which each parameter has a value."""

    method: str
    path: str


WEBSOCKET = "WEBSOCKET"


def read_routes(engine: str, model: Path) -> set[Route]:
    """Return the routes of an engine's app, which a process of its own builds."""
    command = [sys.executable, "-c", f"from tests.integration.app_routes import main; main({engine!r}, {str(model)!r})"]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    done = forked.run(command, imports=forked.VLLM if engine == "vllm" else forked.STUB, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return {Route(*one) for one in json.loads(done.stdout.splitlines()[-1])}


def main(engine: str, model: str) -> None:
    """Print the routes of an engine's app."""
    app = _vllm(model) if engine == "vllm" else _stub(model)
    print(json.dumps(sorted(set(_walk(app.routes)))))


def _vllm(model: str) -> Any:
    from typing import get_args

    from vllm import tasks
    from vllm.entrypoints.cli.serve import make_arg_parser  # its own module moved from 0.32 to 0.33
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model])
    return build_app(args, get_args(tasks.SupportedTask))


def _stub(model: str) -> Any:
    from stage2_trainer.serve.stub.app import WeightUpdates, build_app, receiver
    from stage2_trainer.serve.stub.chat import ChatServer
    from stage2_trainer.serve.stub.model import StubModel

    policy = StubModel(model, dtype="float32", dummy=True, processor_options={})
    updates = WeightUpdates(policy, model, receiver("tcp"), max_lora_rank=None)
    return build_app(ChatServer(policy, max_model_len=512), updates, model)


def _walk(routes: Iterable[Any], before: str = "") -> Iterator[Route]:
    for one in routes:
        path = before + "/".join("1" if part.startswith("{") else part for part in one.path.split("/"))
        methods = getattr(one, "methods", None)
        if "WebSocket" in type(one).__name__:
            yield Route(WEBSOCKET, path)
        elif methods is None:  # a mount
            yield from (Route(ANYTHING, path), Route(ANYTHING, f"{path}/anything"))
            yield from _walk(getattr(one, "routes", None) or (), path)
        else:
            yield from (Route(method, path) for method in methods)
