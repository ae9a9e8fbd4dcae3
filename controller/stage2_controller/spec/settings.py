"""The controller's own configuration, as far as it shapes what a job becomes."""

from dataclasses import dataclass, field
from importlib.metadata import version

from stage2_controller.spec.admin_policy import AdminPolicy

# Of a job that names no image, where no chart says another.
DEFAULT_IMAGE = f"stage2/trainer:{version('stage2')}"


@dataclass(frozen=True)
class Settings:
    """The part of the controller's own configuration that shapes jobs."""

    image: str = DEFAULT_IMAGE
    namespace: str | None = None  # where the controller's own pod runs; None: outside the cluster
    progress_s: float = 10.0  # how often the learner of a running job is asked for its progress
    policy: AdminPolicy = field(default_factory=AdminPolicy)  # what jobs may use
    nodes_may_come: bool = True  # jobs that fit nowhere have pending pods, for an autoscaler to see
    kueue: bool = False  # write Workloads for jobs that name a queue; needs Kueue's definitions
