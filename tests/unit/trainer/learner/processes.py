"""Several learner processes of a test, without their imports: copies of the tests' fork server."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import forked
from tests.unit.trainer.conftest import TINY_MODEL

IMPORTS = (*forked.LEARNER, "tests.unit.trainer.learner.harness")
# The group goes once nothing that the member made holds it: the last holder would wait for its threads for ever.
CODE = (
    "import json, sys; from torch import distributed; from {module} import {name} as member; "
    "member(*json.loads(sys.argv[1])); distributed.is_initialized() and distributed.destroy_process_group()"
)


def run_members(member: Callable[..., None], folder: Path, *arguments: object, count: int = 2) -> None:
    """Call `member(rank, *arguments)` in processes of their own; arguments travel as JSON. All must end well."""
    code = CODE.format(module=member.__module__, name=member.__name__)
    logs = [folder / f"member-{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            command = [sys.executable, "-c", code, json.dumps([rank, *arguments])]
            processes.append(forked.start(command, imports=IMPORTS, stdout=output))
    codes = [process.wait() for process in processes]
    assert codes == [0] * count, "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


def join(rank: int, port: int, *, count: int = 2) -> tuple[Any, Any]:
    """Be one of so many learner processes; returns the tiny model and an encoder."""
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    from stage2_trainer.data.encode import Encoder
    from stage2_trainer.model.transformers_compat import disable_cache

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    model = Qwen3VLForConditionalGeneration.from_pretrained(TINY_MODEL, dtype=torch.float32)
    disable_cache(model)
    return model, Encoder(AutoProcessor.from_pretrained(TINY_MODEL))
