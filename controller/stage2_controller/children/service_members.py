"""The pods behind a job's Service: its own, proved by their owners' uids, and none that only wears their labels. Pure.

Everything is read of what is observed, nothing of the spec: a running job whose spec was edited into a wrong one needs
its servers too.
"""

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from stage2_controller.children import diff, ownership
from stage2_controller.children.endpointslice import endpoint_slice
from stage2_controller.children.meta import Manifest
from stage2_controller.observed import Object, Observed, ended, terminating
from stage2_controller.spec import kinds

_WRITTEN = ("addressType", "ports", "endpoints")


def slices_to_write(observed: Observed) -> tuple[Manifest, ...]:
    """Return the EndpointSlices that are missing or differ: one of each own pod that has an address.

    None where the Deployment goes: each goes with its pod. Nor where the Service chooses by labels, as an older
    controller made it for pods that run: Kubernetes does it then.
    """
    service = observed.service
    if service is None or service["spec"].get("selector") or not service["spec"].get("ipFamilies"):
        return ()  # one without families was made to name another host: it is applied back first
    if observed.deployment is None or terminating(observed.deployment):
        return ()
    known = {one["metadata"]["name"]: one for one in observed.endpointslices}
    wanted = [(pod, endpoint_slice(pod, service, _address(pod, service))) for pod in members(observed)]
    return tuple(one for pod, one in wanted if _differs(one, known.get(pod["metadata"]["name"])))


def members(observed: Observed) -> tuple[Object, ...]:
    """Return the rollout pods that have a node and whose ReplicaSet is of the job's own Deployment.

    A pod's labels and annotations are no proof, whoever makes a pod chooses them. An owner reference to what does not
    exist is none either: it names a uid that no ReplicaSet of the Deployment has.
    """
    if observed.deployment is None:
        return ()
    sets = [one for one in observed.replicasets if _controls(observed.deployment, one)]
    return tuple(
        pod for pod in observed.pods if pod["spec"].get("nodeName") and any(_controls(one, pod) for one in sets)
    )


def service_goes(children: Sequence[Manifest], observed: Observed) -> bool:
    """Return whether the Service is to be deleted, and made anew: it chooses by labels, and is not to.

    Taking the choice away would not do: what Kubernetes has written of it stays behind the Service.
    """
    there = observed.service
    if there is None or terminating(there) or not there["spec"].get("selector"):
        return False
    return bool(diff.writes([child for child in children if child["kind"] == kinds.SERVICE.kind], observed))


def _controls(owner: Object, body: Object) -> bool:
    reference = ownership.controller_of(body)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def _address(pod: Object, service: Object) -> str | None:
    """Return the pod's address of the Service's family; None if it has none yet, or no use for one any more."""
    status: dict[str, Any] = pod.get("status") or {}
    if terminating(pod) or ended(pod):  # its address may be another pod's by now
        return None
    addresses = [one["ip"] for one in status.get("podIPs") or ()]
    family = service["spec"]["ipFamilies"][0]
    return next((one for one in addresses if f"IPv{ip_address(one).version}" == family), None)


def _differs(wanted: Manifest, there: Object | None) -> bool:
    if there is None:
        return bool(wanted["endpoints"])
    metadata = there["metadata"]
    return (
        any((there.get(key) or []) != wanted[key] for key in _WRITTEN)
        or not wanted["metadata"]["labels"].items() <= (metadata.get("labels") or {}).items()
        or metadata.get("ownerReferences") != wanted["metadata"]["ownerReferences"]
    )
