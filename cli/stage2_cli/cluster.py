"""Requests to a cluster's API server, as kubectl finds it: by the kubeconfig's context, or by the pod's account."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage2_api.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_UNAVAILABLE

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from kubernetes.client.rest import RESTResponse

TIMEOUT_S = 20
"""Longest time without an answer, also between two parts of one that ends."""
MANAGER = "stage2"
"""Owner of the fields that this client applies."""
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
_CHUNK = 1 << 16
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class JobError(RuntimeError):
    """A job that failed, or a request about it that was not granted; the message says why."""

    exit_code = EXIT_FAILURE


class RequestRefused(JobError):
    """A request that the API server refused: there is no such job, a right is missing, or a rule is broken."""

    exit_code = EXIT_CONFIG


class NotFound(RequestRefused):
    """A request about an object that is not there."""


class ClusterUnavailable(JobError):
    """No API server is configured, or it cannot be reached or cannot answer now."""

    exit_code = EXIT_UNAVAILABLE


class Cluster:
    """An API server, and the namespace that requests are about if they name none."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content: str = "application/json",
    ) -> dict[str, Any]:
        """Return the object with which the API server answers. Raises RequestRefused or ClusterUnavailable."""
        with self._explained():
            answer = self._send(method, path, query, body, content, TIMEOUT_S)
            document: dict[str, Any] = json.loads(answer.read())
        return document

    def stream(self, path: str, *, query: Mapping[str, str] | None = None) -> Iterator[bytes]:
        """Return an iterator over an answer's parts, each as it comes. Raises as `ask` does, also between parts."""
        with self._explained():
            answer = self._send("GET", path, query, None, "", (TIMEOUT_S, None))
        return self._parts(answer)

    def _parts(self, answer: RESTResponse) -> Iterator[bytes]:
        with self._explained():
            yield from answer.response.stream(_CHUNK)

    def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: object, content: str, timeout: Any
    ) -> RESTResponse:
        from kubernetes.client.exceptions import ApiException

        headers = {"Accept": "application/json, */*"} | ({"Content-Type": content} if body is not None else {})
        request = self._client.param_serialize(
            method, path, None, list((query or {}).items()), headers, body, auth_settings=["BearerToken"]
        )
        answer = self._client.call_api(*request, _request_timeout=timeout)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            answer.read()
            raise ApiException(http_resp=answer)
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of the client as this module's, with the API server's own sentence."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        host = self._client.configuration.host
        try:
            yield
        except ApiException as error:
            reason = _sentence(error.body) or f"{error.status} {error.reason}"
            if not error.status or error.status in (408, 429) or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ClusterUnavailable(f"{host}: {reason}") from error
            raise (NotFound if error.status == HTTPStatus.NOT_FOUND else RequestRefused)(reason) from error
        except HTTPError as error:
            raise ClusterUnavailable(f"{host} cannot be reached: {error}") from error
        except ValueError as error:  # some other server answered
            raise ClusterUnavailable(f"{host} does not answer as an API server does: {error}") from error


def connect(namespace: str | None = None, context: str | None = None, user: str | None = None) -> Cluster:
    """Return the cluster of a context, by default the current one. user: whom to impersonate.

    Raises ClusterUnavailable where nothing names a cluster.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    configuration.retries = False  # callers decide
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        config.load_kube_config(file, context, configuration, persist_config=False)
        own = _namespace_of(context, file)
    except config.ConfigException as error:
        try:
            config.load_incluster_config(configuration)
            own = _NAMESPACE.read_text(encoding="utf-8").strip()
        except (config.ConfigException, OSError):
            way_out = "name a kubeconfig with KUBECONFIG, and a context of it with --context"
            raise ClusterUnavailable(f"no cluster is configured: {file}: {error}; {way_out}") from error
    api = client.ApiClient(configuration)
    if user:
        api.set_default_header("Impersonate-User", user)
    return Cluster(api, namespace or own)


def _namespace_of(context: str | None, file: str) -> str:
    """Return the namespace of a context."""
    from kubernetes import config

    contexts, current = config.list_kube_config_contexts(file)
    chosen = next((one for one in contexts if one["name"] == context), current)
    namespace: str = chosen["context"].get("namespace") or "default"
    return namespace


def _sentence(body: str | None) -> str:
    """Return the message of the API server's Status; empty if the answer is none."""
    try:
        status = json.loads(body or "")
    except ValueError:
        return ""
    return str(status.get("message") or "") if isinstance(status, dict) else ""
