"""The Service of the rollout pod: one stable port for each server."""

from collections.abc import Mapping, Sequence
from typing import Any

from stage2_controller.children import meta
from stage2_controller.spec import kinds, names
from stage2_controller.spec.containers import Container


def service(owner: Mapping[str, Any], servers: Sequence[Container]) -> meta.Manifest:
    """Return ClusterIP Service `<job>-rollout`.

    Its addresses are published before they are ready: readiness is the pod's, so one crashed server would otherwise
    make its neighbours unreachable, and a restarted server could not be sent the weights that make it ready. It chooses
    pods by labels, which is all that a cluster without a controller can do.
    """
    ports = [
        {"name": server.name, "port": server.port, "targetPort": server.port, "protocol": "TCP"} for server in servers
    ]
    body = {
        "spec": {
            "type": "ClusterIP",
            "selector": meta.selector(owner["name"], names.ROLE_ROLLOUT),
            "publishNotReadyAddresses": True,
            "ports": ports,
        }
    }
    return meta.child(kinds.SERVICE, owner=owner, body=body)


def choosing_nobody(manifest: meta.Manifest) -> meta.Manifest:
    """Return the Service without the choice by labels, which anybody's pod can wear; needs `endpointslice`."""
    return {**manifest, "spec": {**manifest["spec"], "selector": {}}}
