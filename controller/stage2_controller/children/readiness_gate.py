"""The readiness gate of the rollout pod: true while every server holds the weights that the learner pushed last. Pure.

A server that was started anew holds the checkpoint's weights until the next push: it must not count as ready.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stage2_controller import conditions
from stage2_controller.conditions import Truth, truth
from stage2_controller.observed import Object, Observed, terminating
from stage2_controller.spec import names


class GateCondition(NamedTuple):
    """The condition that a pod is to have."""

    pod: str
    status: Truth
    message: str


def gate(observed: Observed, status: Mapping[str, Any]) -> GateCondition | None:
    """Return what has to be told of the rollout pod; None if it is told already, or nobody waits for it."""
    pod = observed.pod(names.ROLE_ROLLOUT)
    if pod is None or terminating(pod) or not _has_gate(pod):
        return None
    version = (status.get("sync") or {}).get("version")
    behind = _behind(status, version)
    wanted = truth(version is not None and not behind)
    if _told(pod) == wanted:
        return None
    message = f"waits for version {version}: {', '.join(behind)}" if behind else f"all servers hold version {version}"
    return GateCondition(pod["metadata"]["name"], wanted, message)


def _behind(status: Mapping[str, Any], version: int | None) -> list[str]:
    return [item["name"] for item in status.get("servers") or [] if item.get("version") != version]


def _has_gate(pod: Object) -> bool:
    return any(item.get("conditionType") == names.GATE for item in pod["spec"].get("readinessGates", ()))


def _told(pod: Object) -> Truth:
    """Return the status of the pod's condition; a pod that has none yet is not ready."""
    told = conditions.find(pod.get("status", {}), names.GATE)
    found: Truth = told["status"] if told else "False"
    return found
