"""The children of a job as static YAML, for a cluster where no controller runs. Pure, but for fresh credentials."""

from collections.abc import Mapping
from datetime import UTC, datetime

from stage2_api.job import RolloutMatchingJob
from stage2_controller.children import secret
from stage2_controller.children.desired import children, namespace_of
from stage2_controller.children.meta import Manifest
from stage2_controller.spec import credentials, names
from stage2_controller.spec.containers import containers
from stage2_controller.spec.settings import DEFAULT_IMAGE, Settings


def static_children(
    accepted: RolloutMatchingJob,
    *,
    namespace: str | None = None,
    image: str = DEFAULT_IMAGE,
    content: Mapping[str, str] | None = None,
) -> list[Manifest]:
    """Return all children of a job without an owner. Raise ConfigError if a pod template breaks what the job needs.

    The learner then waits for its servers by itself. Without `content` the Secret's is fresh.
    """
    owner = {"name": accepted.metadata.name, "namespace": namespace or namespace_of(accepted)}
    host = names.service_host(owner["name"], owner["namespace"])
    tls = accepted.spec.tls.enabled
    processes = containers(accepted, host_for=lambda _: host, tls=tls)
    hosts = names.certificate_hosts(owner["name"], owner["namespace"]) if tls else {}
    return [
        secret.secret(owner, content or credentials.new(hosts, datetime.now(UTC))),
        *children(accepted, owner, processes, Settings(image=image)),
    ]
