"""Parts of a job that only the controller does: an executor without one names it, and leaves nothing out silently."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from stage2_api.job import RolloutMatchingJob

# What asks for somebody who watches the job; nobody does where its children are static YAML.
WATCHED = ("spec.suspend", "spec.active_deadline_seconds", "spec.ttl_seconds_after_finished")
# What may change a container (its environment, its arguments) by way of its pod; processes have none.
TEMPLATES = ("spec.rollout.template", "spec.learner.template")

# What crosses no network: processes on one machine speak over loopback.
NETWORK = ("spec.tls.enabled", "spec.network.egress")


def left_out(job: RolloutMatchingJob, fields: Sequence[str]) -> list[str]:
    """Those of the fields (in Python's spelling) that the job sets to something; as the file spells them."""
    return [_spelled(path) for path in fields if _given(job, path.split("."))]


def _given(job: RolloutMatchingJob, path: Sequence[str]) -> bool:
    *parents, name = path
    parent = reduce(getattr, parents, job)
    return name in parent.model_fields_set and getattr(parent, name) not in (None, False, {}, [])


def _spelled(path: str) -> str:
    first, *rest = path.split("_")
    return first + "".join(part.capitalize() for part in rest)
