"""stage2 from Python: jobs of a cluster (`Job`), and a trained model that lists the objects of images (`Model`)."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stage2_api.errors import ConfigError
from stage2_api.job_status import JobStatus
from stage2_cli.cluster import ClusterUnavailable, JobError, RequestRefused
from stage2_cli.job import Job, JobEvent

if TYPE_CHECKING:
    from stage2_trainer.infer.model import Model

__all__ = [
    "ClusterUnavailable",
    "ConfigError",
    "Job",
    "JobError",
    "JobEvent",
    "JobStatus",
    "Model",
    "RequestRefused",
    "__version__",
]

__version__ = version("stage2")


def __getattr__(name: str) -> Any:
    """Import `Model` when it is first used: it needs packages of the extra `trainer`, which `Job` does not."""
    if name != "Model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stage2_trainer.infer.model import Model

    return Model
