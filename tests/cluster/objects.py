"""Objects of a cluster, read and written without a process for each call: tests look at them many times a second."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import urllib3
from kubernetes import config, dynamic
from kubernetes.client import ApiException
from kubernetes.dynamic.exceptions import NotFoundError, ResourceNotFoundError

Object = dict[str, Any]
FAILURES = (urllib3.exceptions.HTTPError, ApiException)
"""What a call raises when the API server does not answer, or refuses."""
MERGE = "application/merge-patch+json"


def get(kubeconfig: Path, namespace: str, kind: str, name: str) -> Object | None:
    """Return an object, or None; `kind` is one of the names that kubectl takes."""
    try:
        return _plain(_resource(kubeconfig, kind).get(name=name, namespace=namespace))
    except (NotFoundError, ResourceNotFoundError):
        return None


def listed(kubeconfig: Path, namespace: str, kind: str, selector: str = "") -> list[Object]:
    """Return all objects of a kind in a namespace that have these labels, the oldest first."""
    found = _plain(_resource(kubeconfig, kind).get(namespace=namespace, label_selector=selector))
    return sorted(found["items"], key=lambda one: str(one["metadata"]["creationTimestamp"]))


def merge_status(kubeconfig: Path, namespace: str, kind: str, name: str, status: Object) -> None:
    """Merge a status into an object's, as what owns it would."""
    resource = _resource(kubeconfig, kind).subresources["status"]
    resource.patch(name=name, namespace=namespace, body={"status": status}, content_type=MERGE)


def _plain(answer: Any) -> Object:
    found: Object = answer.to_dict()
    return found


class _Discoverer(dynamic.EagerDiscoverer):
    """A discoverer that leaves out an API whose own server is away, as kubectl does: the others are there."""

    def get_resources_for_api_version(self, prefix: str, group: str, version: str, preferred: bool) -> Any:
        try:
            return super().get_resources_for_api_version(prefix, group, version, preferred)
        except ApiException:
            return {}


@functools.cache
def _client(kubeconfig: Path) -> dynamic.DynamicClient:
    with TemporaryDirectory() as folder:  # what one cluster serves is no answer for the next at the same address
        client = config.new_client_from_config(str(kubeconfig))
        return dynamic.DynamicClient(client, cache_file=f"{folder}/served.json", discoverer=_Discoverer)


def _resource(kubeconfig: Path, kind: str) -> Any:
    """Return what the API server serves under a name of a kind.

    Raises:
        ResourceNotFoundError: it serves none of that name.
    """
    client = _client(kubeconfig)
    if not (found := _served(client, kind)):
        client.resources.invalidate_cache()
        found = _served(client, kind)
    if not found:
        raise ResourceNotFoundError(f"the API server serves no {kind}")
    return found


def _served(client: dynamic.DynamicClient, kind: str) -> Any:
    """Return the resource of that name in the group that kubectl would choose: the core's own before all others."""
    every = client.resources.search()
    matching = [one for one in every if kind in _names(one)]
    return min(matching, key=lambda one: (bool(one.group), not one.preferred), default=None)


def _names(resource: Any) -> set[str]:
    """Return plural, singular and short names of a resource; a list of resources has none."""
    if not hasattr(resource, "singular_name"):
        return set()
    return {resource.name, resource.singular_name, *(resource.short_names or ())}
