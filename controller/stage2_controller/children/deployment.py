"""The rollout Deployment: one pod with one container for each server.

One pod, so that the scheduler places all servers on one node at once; one container a server, so that the device plugin
pins each to its own GPUs and a crashed server restarts alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stage2_api.job import RolloutMatchingJob
from stage2_api.pod.ports import HEALTH_ROUTE
from stage2_controller.children import meta, pod
from stage2_controller.spec import kinds, names
from stage2_controller.spec.containers import Container

_PROBE_PERIOD_S = 5
_STUCK_LIMIT_S = 300  # a machine out of memory or cores may be silent for minutes, and come back
_START_LIMIT_S = 3600  # at least: a large model over a slow disk. A shorter start deadline is the controller's to keep


def deployment(
    job: RolloutMatchingJob, owner: Mapping[str, Any], servers: Sequence[Container], *, config_text: str, image: str
) -> meta.Manifest:
    """Return Deployment `<job>-rollout`."""
    limit_s = max(_START_LIMIT_S, job.spec.learner.start_deadline_seconds)
    containers = [pod.container(job, server, image=image, extra=_probes(job, server, limit_s)) for server in servers]
    template = pod.template(
        job,
        role=names.ROLE_ROLLOUT,
        containers=containers,
        config_text=config_text,
        extra={},
        override=job.spec.rollout.template,
    )
    spec = {
        "replicas": 1,
        # Two rollout pods would need twice the GPUs.
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": limit_s,
        "selector": {"matchLabels": meta.selector(job.metadata.name, names.ROLE_ROLLOUT)},
        "template": template,
    }
    return meta.child(kinds.DEPLOYMENT, owner=owner, body={"spec": spec})


def gated(manifest: meta.Manifest) -> meta.Manifest:
    """Return the Deployment whose pod is ready only when its weights are; needs a controller that says so."""
    spec = manifest["spec"]
    pod_spec = {**spec["template"]["spec"], "readinessGates": [{"conditionType": names.GATE}]}
    return {**manifest, "spec": {**spec, "template": {**spec["template"], "spec": pod_spec}}}


def _probes(job: RolloutMatchingJob, server: Container, start_limit_s: int) -> dict[str, Any]:
    """Return the probes: a server that says for minutes that it cannot take weights, or nothing, is started again.

    A dead engine ends its process, and one busy with long rollouts answers. The startup probe ends a server, so it
    waits for as long as the job may: the job's deadline began before.
    """
    health = {
        "httpGet": {"path": HEALTH_ROUTE, "port": server.port, "scheme": "HTTPS" if job.spec.tls.enabled else "HTTP"},
        "periodSeconds": _PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }
    return {
        "startupProbe": {**health, "failureThreshold": math.ceil(start_limit_s / _PROBE_PERIOD_S)},
        "readinessProbe": {**health, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": _STUCK_LIMIT_S // _PROBE_PERIOD_S},
    }
