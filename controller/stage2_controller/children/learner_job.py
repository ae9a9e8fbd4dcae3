"""The learner Job: one pod, on the node of the rollout pod."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stage2_api.errors import EXIT_CONFIG, EXIT_EXHAUSTED
from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import termination
from stage2_controller.children import meta, pod
from stage2_controller.spec import kinds, names
from stage2_controller.spec.containers import Container, waiting


def learner_job(
    job: RolloutMatchingJob,
    owner: Mapping[str, Any],
    learner: Container,
    *,
    config_text: str,
    image: str,
    follows: bool,
) -> meta.Manifest:
    """Return Job `<job>-learner`.

    `follows`: its pod may only run where this job's rollout pod runs, and holds its place there while the servers load:
    its first container waits for them.
    """
    extra: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": termination.GRACE_S}
    if follows:
        extra["affinity"] = _with_rollout_pod(job.metadata.name)
        extra["initContainers"] = [pod.container(job, waiting(learner), image=image, extra={})]
    template = pod.template(
        job,
        role=names.ROLE_LEARNER,
        containers=[pod.container(job, _restarting(learner, job), image=image, extra={})],
        config_text=config_text,
        extra=extra,
        override=job.spec.learner.template,
    )
    spec = {
        "backoffLimit": job.spec.learner.backoff_limit,
        # Never two learners at once: both would write the same output folder.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [_FAIL_AT_ONCE, _IGNORE_DISRUPTION]},
        "template": template,
    }
    return meta.child(kinds.LEARNER_JOB, owner=owner, body={"spec": spec})


def _restarting(learner: Container, job: RolloutMatchingJob) -> Container:
    """Return the learner that is started again in its own pod, which keeps its GPUs; the Job makes up for lost pods."""
    limit = job.spec.learner.backoff_limit
    return replace(learner, command=(*learner.command, f"--restarts={limit}")) if limit else learner


_FAIL_AT_ONCE = {
    "action": "FailJob",
    "onExitCodes": {"containerName": names.ROLE_LEARNER, "operator": "In", "values": [EXIT_CONFIG, EXIT_EXHAUSTED]},
}
_IGNORE_DISRUPTION = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


def _with_rollout_pod(name: str) -> dict[str, Any]:
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": meta.selector(name, names.ROLE_ROLLOUT)},
    }
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
