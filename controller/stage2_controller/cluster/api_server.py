"""Requests to the API server: create, server-side apply, delete, status, events, lists and watches."""

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from stage2_controller.children.manifest import digest
from stage2_controller.job import kinds, names
from stage2_controller.report.explanation import Event
from stage2_controller.state import conditions, store

logger = logging.getLogger(__name__)

Object = Mapping[str, Any]

Requested = Callable[[str, str, int], None]
_MESSAGE_LIMIT = 1024  # characters; the API server refuses longer event messages
_REQUEST_S = 30
_MERGE = "application/merge-patch+json"
_METHODS = {"list": "get", "create": "post", "update": "put"}  # of HTTP, where the verb has another name
_EVENTS = 100  # of one object and reason; clients count alike events up in one
_PAGE = 500  # objects
PAGE_OF_JOBS = 50
"""Jobs of one page of a list. A job may have 150 kB, and the event loop stands still while a page is decoded."""
# A node lists all its images. A page of pods takes 1 MB, and five times that once it is decoded.
_PAGES = {names.KIND: PAGE_OF_JOBS, kinds.NODE.kind: 50, kinds.POD.kind: 200}


class ApiRefused(Exception):
    """The API server refused a request."""

    def __init__(self, what: str, error: DynamicApiError) -> None:
        self.status: int = error.status
        answer = _status_of(error)
        self.reason: str | None = answer.get("reason")  # a word, such as AlreadyExists
        self.message = conditions.shorten(str(answer.get("message") or f"{error.status} {error.reason}"))
        super().__init__(f"{what}: {self.message}")

    @property
    def not_served(self) -> bool:
        """Whether the API server knows no such kind; an answer about a missing object has more details."""
        return self.status == HTTPStatus.NOT_FOUND and self.reason is None

    @property
    def of_object(self) -> bool:
        """Whether this object was refused, also by a webhook that fails; else the API server refuses everything now."""
        return self.status < HTTPStatus.INTERNAL_SERVER_ERROR or "webhook" in self.message


class NoCluster(Exception):
    """No configuration names a cluster; the text says what was looked for."""


async def connect(requested: Requested) -> "Api":
    """Return a client by KUBECONFIG, else by the pod's service account, else by ~/.kube/config.

    `requested(verb, resource, code)` is called for every request; code 0 means no answer. Raise NoCluster
    where none names a cluster.
    """
    # aiohttp would read ~/.netrc and the environment's proxies in a thread, for every request. The watches never did: a
    # proxy stands in the kubeconfig.
    configuration = client.Configuration(client_session_kwargs={"trust_env": False})
    named = os.environ.get("KUBECONFIG")
    if named or not _by_service_account(configuration):
        named = named or "~/.kube/config"
        try:
            await config.load_kube_config(named, client_configuration=configuration)
        except config.ConfigException as error:
            way_out = "outside a pod the controller needs a kubeconfig with a current context"
            raise NoCluster(f"KUBECONFIG: {named!r}: {error}; {way_out}") from error
    configuration.connection_pool_maxsize = 0  # no bound: every watch holds a connection
    return Api(PlainClient(configuration), requested)


def _by_service_account(configuration: client.Configuration) -> bool:
    """Return whether this process is in a pod that has a service account, which `configuration` then uses."""
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        return False
    return True


class PlainClient(client.ApiClient):
    """A client whose bodies are plain JSON already: it need not copy them to find out."""

    def sanitize_for_serialization(self, obj: object) -> object:
        """Return what is sent as it is."""
        return obj


class Api:
    """The few requests that the controller makes. Objects are plain dictionaries, as on the wire."""

    def __init__(self, api_client: client.ApiClient, requested: Requested) -> None:
        self._client = api_client
        self._requested = requested
        self._dynamic = DynamicClient(api_client)

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None if there is none."""
        return await _accepting(self._request("get", kind, namespace, name), 404)

    async def try_list(self, kind: str, namespace: str | None) -> None:
        """Ask for one object of a kind. Raise ApiRefused where lists of it are refused."""
        await self._request("list", kind, namespace, limit=1)

    async def pages(
        self, kind: str, namespace: str | None, *, labels: str | None, fields: str | None
    ) -> AsyncIterator[Object]:
        """Return the pages of a list, all of one state of the cluster: only one is held at a time."""
        more = None
        while True:
            page = await self._request(
                "list",
                kind,
                namespace,
                label_selector=labels,
                field_selector=fields,
                limit=_PAGES.get(kind, _PAGE),
                _continue=more,
            )
            yield page
            more = page["metadata"].get("continue")
            if not more:
                return

    async def events_of(self, namespace: str, uid: str, reason: str) -> Sequence[Object]:
        """Return events of this reason about the object with this uid; of very many only the first."""
        fields = f"involvedObject.uid={uid},reason={reason}"
        page = await self._request("list", "Event", namespace, field_selector=fields, limit=_EVENTS)
        found: Sequence[Object] = page["items"]
        return found

    async def watch(
        self,
        kind: str,
        version: str,
        *,
        ends_after_s: int,
        namespace: str | None,
        labels: str | None,
        fields: str | None,
    ) -> AsyncIterator[Object]:
        """Yield the events of a kind in one namespace or in all since a resource version, for some time.

        It ends early where that version is too old. The typed API has watches too, but its models cost 100 MB.
        """
        where = path(kind, namespace)
        try:
            answer: aiohttp.ClientResponse = await self._dynamic.request(
                "get",
                where,
                serialize=False,
                query_params=[("watch", "true"), ("resourceVersion", version), ("timeoutSeconds", ends_after_s)],
                label_selector=labels,
                field_selector=fields,
                header_params={},
                _request_timeout=float(ends_after_s + _REQUEST_S),  # also if the network fails
            )
        except DynamicApiError as error:
            raise ApiRefused(f"WATCH {where}", error) from error
        try:
            async for line in _lines(answer.content):
                event = store.read(line)
                if event["type"] == "ERROR":
                    return
                yield event
        finally:
            answer.close()

    async def apply(self, manifest: Object, subresource: str = "") -> Object:
        """Apply the object server-side, and take over fields that others hold."""
        metadata = manifest["metadata"]
        return await self._request(
            "patch",
            manifest["kind"],
            metadata["namespace"],
            metadata["name"],
            subresource,
            body=manifest,
            content_type="application/apply-patch+yaml",
            field_manager=names.FIELD_MANAGER,
            force_conflicts="true",
        )

    async def apply_status(self, job: Object, status: Object) -> Object | None:
        """Replace the job's status; return None if the job is gone, or another one has its name."""
        metadata = {key: job["metadata"][key] for key in ("name", "namespace", "uid")}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": status}
        return await _accepting(self.apply(body, "status"), 404, 409)

    async def patch_status(self, kind: str, namespace: str, name: str, patch: Object) -> None:
        """Merge into the status of an object that another controller owns too, unless it is gone or has changed."""
        request = self._request("patch", kind, namespace, name, "status", body=patch, content_type=_MERGE)
        await _accepting(request, 404, 409)

    async def create(self, manifest: Object) -> Object | None:
        """Create the object; return None if it exists already, which is left as it is."""
        kind, namespace = manifest["kind"], manifest["metadata"]["namespace"]
        try:
            return await self._request("create", kind, namespace, body=manifest, field_manager=names.FIELD_MANAGER)
        except ApiRefused as error:
            if error.reason == "AlreadyExists":  # a quota that was written meanwhile is a conflict too
                return None
            raise

    async def replace(self, manifest: Object) -> Object | None:
        """Replace the object as it was read; return None if it has changed since then, or is gone."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        manager = names.FIELD_MANAGER
        request = self._request(
            "update", kind, metadata["namespace"], metadata["name"], body=manifest, field_manager=manager
        )
        return await _accepting(request, 404, 409)

    async def delete(self, kind: str, namespace: str, name: str, **same: str) -> Object | None:
        """Delete the object and, in the background, what it owns; return what remains of it.

        same: the uid, and perhaps the resourceVersion, that the object must have. Another one stays.
        """
        options = {"propagationPolicy": "Background", "preconditions": same}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        answer = await _accepting(self._request("delete", kind, namespace, name, body=body), 404, 409)
        return None if answer is None or answer.get("kind") == "Status" else answer

    async def emit(self, job: Object, event: Event, *, at: str) -> None:
        """Post an event about the job, or count it if there is one like it; `at` is an RFC 3339 time."""
        metadata, kind = job["metadata"], "Event"
        namespace, name = metadata["namespace"], metadata["name"][:200].rstrip("-.")
        name = f"{name}.{digest([metadata['uid'], *event])}"
        body = {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                **{key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:_MESSAGE_LIMIT],
            "source": {"component": names.FIELD_MANAGER},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        if await self.create(body) is None:
            known = await self.get(kind, namespace, name) or {}
            again = {"count": known.get("count", 0) + 1, "lastTimestamp": at}
            await _accepting(self._request("patch", kind, namespace, name, body=again, content_type=_MERGE), 404)

    async def _request(
        self,
        verb: str,
        kind: str,
        namespace: str | None,
        name: str | None = None,
        subresource: str = "",
        **parameters: Any,
    ) -> dict[str, Any]:
        """Return the answer to a request. verb: as RBAC names it."""
        method, where = _METHODS.get(verb, verb), path(kind, namespace, name, subresource)
        resource, code = "/".join(filter(None, (kinds.RESOURCES[kind].plural, subresource))), 0
        try:
            response = await self._dynamic.request(
                method,
                where,
                serialize=False,
                _request_timeout=_REQUEST_S,
                query_params=[],
                header_params={},
                **parameters,
            )
            answer: dict[str, Any] = await response.json(loads=store.read)
            code = response.status
        except DynamicApiError as error:
            code = error.status
            raise ApiRefused(f"{method.upper()} {where}", error) from error
        finally:
            self._requested(verb, resource, code)
        return answer


async def _accepting(request: Awaitable[Object], *accepted: int) -> Object | None:
    """Return the answer to a request; None where the status is an accepted refusal."""
    try:
        return await request
    except ApiRefused as error:
        if error.status not in accepted:
            raise
        return None


def path(kind: str, namespace: str | None, name: str | None = None, subresource: str = "") -> str:
    """Return the API path of an object, or of all objects of its kind. No name leads out of it."""
    resource = kinds.RESOURCES[kind]  # known here: no discovery requests, and no permission for them
    group = "apis" if "/" in resource.api_version else "api"
    if name in (".", ".."):
        raise ValueError(f"{name} is no name of a {kind}")
    space = f"namespaces/{quote(namespace, safe='')}" if namespace else ""
    parts = [group, resource.api_version, space, resource.plural, quote(name or "", safe=""), subresource]
    return "/" + "/".join(filter(None, parts))


def _status_of(error: DynamicApiError) -> dict[str, Any]:
    """Return the API server's Status; an empty one if the answer is none."""
    try:
        answer = store.read(error.body or "")
    except (TypeError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines of any length; aiohttp's own reader refuses long ones, and a pod may be one."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
