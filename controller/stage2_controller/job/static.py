"""The children of a job as static YAML, for a cluster where no controller runs. Pure, but for a fresh token."""

import secrets

from stage2_api.job import RolloutMatchingJob
from stage2_controller.job import names
from stage2_controller.job.children import secret
from stage2_controller.job.children.meta import Manifest
from stage2_controller.job.containers import containers
from stage2_controller.job.desired import children, namespace_of
from stage2_controller.job.settings import DEFAULT_IMAGE, Settings


def static_children(
    accepted: RolloutMatchingJob, *, namespace: str | None = None, image: str = DEFAULT_IMAGE, token: str | None = None
) -> list[Manifest]:
    """Return all children of a job without an owner. Raise ConfigError if a pod template breaks what the job needs.

    The learner then waits for its servers by itself. Without `token` the Secret gets a fresh one.
    """
    owner = {"name": accepted.metadata.name, "namespace": namespace or namespace_of(accepted)}
    host = names.service_host(owner["name"], owner["namespace"])
    processes = containers(accepted, host_for=lambda _: host)
    return [
        secret.secret(owner, token or secrets.token_urlsafe(32)),
        *children(accepted, owner, processes, Settings(image=image)),
    ]
