"""Several learner processes of a test, without their imports: copies of the tests' fork server."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests import forked

IMPORTS = (*forked.LEARNER, "tests.unit.trainer.learner.harness")
CODE = "import json, sys; from {module} import {name} as member; member(*json.loads(sys.argv[1]))"


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
