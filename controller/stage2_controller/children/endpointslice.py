"""The EndpointSlice of one rollout pod: the pod's place behind the job's Service.

The pod owns it, so that the garbage collector takes it away with the pod, whether or not a controller runs then.
"""

from collections.abc import Mapping
from typing import Any

from stage2_controller.children import meta
from stage2_controller.spec import kinds, names

SERVICE_LABEL = "kubernetes.io/service-name"
MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"  # Kubernetes' own controllers leave it alone


def endpoint_slice(pod: Mapping[str, Any], service: Mapping[str, Any], address: str | None) -> meta.Manifest:
    """Return EndpointSlice `<pod>`, with one address behind the Service, or none.

    The address is ready however the pod is, as the Service demands (`children.service`).
    """
    metadata, job = pod["metadata"], service["metadata"]["annotations"][names.ANNOTATION_JOB]
    named = {key: metadata[key] for key in ("name", "uid")}
    endpoint = {
        "addresses": [address],
        "conditions": {"ready": True},
        "nodeName": pod["spec"]["nodeName"],
        "targetRef": {"kind": kinds.POD.kind, "namespace": metadata["namespace"], **named},
    }
    return {
        "apiVersion": kinds.ENDPOINT_SLICE.api_version,
        "kind": kinds.ENDPOINT_SLICE.kind,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {
                **meta.labels(job, names.ROLE_ROLLOUT),
                SERVICE_LABEL: service["metadata"]["name"],
                MANAGER_LABEL: names.FIELD_MANAGER,
            },
            "annotations": {names.ANNOTATION_JOB: job},
            "ownerReferences": [{"apiVersion": kinds.POD.api_version, "kind": kinds.POD.kind, **named}],
        },
        "addressType": service["spec"]["ipFamilies"][0],
        "ports": [
            {"name": port["name"], "port": port["targetPort"], "protocol": port["protocol"]}
            for port in service["spec"]["ports"]
        ],
        "endpoints": [endpoint] if address else [],
    }
