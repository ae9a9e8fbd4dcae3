"""The readiness gate of the rollout pod: true while every server holds the weights that the learner pushed last. Pure.

A server that was started anew holds the checkpoint's weights until the next push: it must not count as ready.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stage2_controller.job import names
from stage2_controller.job.conditions import Truth, truth
from stage2_controller.job.observed import Observed, terminating


class GateCondition(NamedTuple):
    """The condition that a pod is to have."""

    pod: str
    status: Truth
    message: str


def gate(observed: Observed, status: Mapping[str, Any]) -> GateCondition | None:
    """What has to be told of the rollout pod; None if its condition is right already, or nobody waits for it."""
    pod = observed.pod(names.ROLE_ROLLOUT)
    if pod is None or terminating(pod) or not _has_gate(pod):
        return None
    version = (status.get("sync") or {}).get("version")
    behind = [item["name"] for item in status.get("servers") or [] if item.get("version") != version]
    wanted = truth(version is not None and not behind)
    told = next((item for item in pod.get("status", {}).get("conditions", []) if item["type"] == names.GATE), None)
    if (told["status"] if told else "False") == wanted:
        return None
    message = f"waits for version {version}: {', '.join(behind)}" if behind else f"all servers hold version {version}"
    return GateCondition(pod["metadata"]["name"], wanted, message)


def _has_gate(pod: Mapping[str, Any]) -> bool:
    return any(item.get("conditionType") == names.GATE for item in pod["spec"].get("readinessGates", ()))
