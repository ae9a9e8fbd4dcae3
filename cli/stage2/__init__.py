"""stage2 from Python: jobs of a cluster (`Job`), and a trained model that lists the objects of images (`Model`).

A job is submitted from its file; all requests go through kubectl, with its contexts and credentials.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage2_api.errors import ConfigError
from stage2_api.job import GROUP, PLURAL
from stage2_cli.config_files import load_job
from stage2_cli.jobs import job_report, kubectl_options, write_logs
from stage2_cli.kubectl import PATIENCE, kubectl

if TYPE_CHECKING:
    from stage2_trainer.infer.model import Model

__all__ = ["ConfigError", "Job", "JobError", "Model", "__version__"]

__version__ = version("stage2")

MOST_LOST = 10  # requests in a row
REFUSED = re.compile(r"\((NotFound|Forbidden|Unauthorized)\)|does not exist|not installed")
"""In errors of kubectl that no other try would change."""


def __getattr__(name: str) -> Any:
    """Import `Model` when it is first used: it needs packages of the extra `trainer`, which `Job` does not."""
    if name != "Model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stage2_trainer.infer.model import Model

    return Model


class JobError(RuntimeError):
    """A request that kubectl or the API server refused, or a job that failed; the message says why."""


class _LostError(JobError):
    """A request that may succeed another time: kubectl did not reach the API server, say."""


@dataclass(frozen=True)
class Job:
    """A job by its name, in kubectl's namespace and context unless others are given. file: what is submitted."""

    name: str
    namespace: str | None = None
    context: str | None = None
    file: Path | None = None

    @classmethod
    def from_file(cls, path: str | Path, *, namespace: str | None = None, context: str | None = None) -> Job:
        """Read and check a job file. Raises ConfigError with every mistake in it."""
        metadata = load_job(Path(path)).metadata
        return cls(metadata.name, namespace or metadata.namespace, context, Path(path))

    def submit(self) -> Job:
        """Create the job, or apply what its file changes."""
        if self.file is None:
            raise JobError(f"{self.name} has no file: use Job.from_file")
        self._ask(["apply", f"--filename={self.file}"])
        return self

    def status(self) -> dict[str, Any]:
        """Return the job's status; empty until the controller has seen the newest write of the job."""
        found = json.loads(self._ask(["get", f"{PLURAL}.{GROUP}", self.name, "--output=json"]))
        status: dict[str, Any] = found.get("status") or {}
        return status if status.get("observedGeneration") == found["metadata"]["generation"] else {}

    def wait(self, timeout: float | None = None, *, every: float = 5.0) -> Job:
        """Wait until the job has succeeded; an API server may be lost for some requests, each after `every` seconds.

        Raises JobError if the job fails or the cluster refuses to show it, TimeoutError after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        lost = 0
        while True:
            try:
                sentence, lost = self._obstacle(), 0
            except _LostError as error:
                sentence, lost = f"{error}", lost + 1
                if lost == MOST_LOST:
                    raise
            if not sentence:
                return self
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(sentence)
            time.sleep(every)

    def _obstacle(self) -> str:
        """Return why the job has not succeeded yet; nothing if it has. Raises JobError if it has failed."""
        status = self.status()
        if (phase := status.get("phase")) == "Succeeded":
            return ""
        sentence = f"{self.name} is {phase or 'not seen yet'}: {status.get('message') or 'is stage2 installed?'}"
        if phase == "Failed":
            raise JobError(sentence)
        return sentence

    def logs(self, *, servers: bool = False) -> str:
        """Return the log of the job's learner, or of its servers, so far."""
        with tempfile.TemporaryFile() as file:
            code, error = write_logs(self.name, self._options, file, servers=servers)
            if code:
                raise JobError(f"kubectl logs of {self.name} ended with {code}: {error or 'it gave no reason'}")
            file.seek(0)
            return file.read().decode("utf-8", "replace")

    def report(self, html: str | Path | None = None) -> None:
        """Print the job's steps and evaluations as tables, or write them as one page."""
        if code := job_report(self.name, self._options, Path(html) if html else None):
            raise JobError(f"kubectl logs of {self.name} ended with {code}")

    @property
    def _options(self) -> list[str]:
        return kubectl_options(self.namespace, self.context, None)

    def _ask(self, words: Sequence[str]) -> str:
        code, output, error = kubectl([*words, *self._options, PATIENCE], stdout=subprocess.PIPE)
        if code:
            kind = JobError if REFUSED.search(error) else _LostError
            raise kind(f"kubectl {words[0]} of {self.name}: {error}")
        return output
