"""What the client makes of the API server's answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from kubernetes.aio.config import incluster_config

from stage2_controller.cluster.api_server import Api, ApiRefused, connect, path
from stage2_controller.job import names
from stage2_controller.report.explanation import Event
from tests.unit.controller import builders as b


@asynccontextmanager
async def connected(*routes: web.RouteDef) -> AsyncIterator[Api]:
    """A client of an API server with these routes."""
    application = web.Application()
    application.add_routes(routes)
    async with TestServer(application) as server:
        api = Api(client.ApiClient(client.Configuration(host=str(server.make_url("")))), lambda *_: None)
        try:
            yield api
        finally:
            await api.close()


async def answered(
    route: Callable[..., web.RouteDef], where: str, status: int, use: Callable[[Api], Awaitable[Any]]
) -> tuple[Any, Any]:
    """What the client makes of a request that the API server answers with this code, and what it sent."""
    sent: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(await request.json())
        return web.json_response({"kind": "Status", "message": "expected"}, status=status)

    async with connected(route(where, answer)) as api:
        return await use(api), sent[0]


async def patched(status: int) -> tuple[Any, Any]:
    where = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team-a/workloads/one/status"
    patch = {"metadata": {"resourceVersion": "7"}, "status": {"conditions": []}}
    return await answered(web.patch, where, status, lambda api: api.patch_status("Workload", "team-a", "one", patch))


async def deleted(status: int) -> tuple[Any, Any]:
    where = "/apis/stage2.dev/v1alpha1/namespaces/team-a/rolloutmatchingjobs/one"
    same = {"uid": "u", "resourceVersion": "7"}
    return await answered(web.delete, where, status, lambda api: api.delete(names.KIND, "team-a", "one", **same))


@pytest.mark.parametrize("request_", [patched, deleted])
@pytest.mark.parametrize("status", [404, 409])
async def test_not_found_or_conflict_on_patch_or_delete_is_no_error(request_: Any, status: int) -> None:
    assert (await request_(status))[0] is None


@pytest.mark.parametrize("request_", [patched, deleted])
async def test_forbidden_patch_or_delete_raises(request_: Any) -> None:
    with pytest.raises(ApiRefused):
        await request_(403)


async def test_deletion_is_conditional_on_version_that_was_read() -> None:
    _, sent = await deleted(200)
    assert sent["preconditions"] == {"uid": "u", "resourceVersion": "7"}
    assert sent["propagationPolicy"] == "Background"


async def test_netrc_credentials_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Authorization"))
        return web.json_response({})

    application = web.Application()
    application.router.add_get("/api/v1/nodes/x", answer)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    async with TestServer(application) as server:
        b.kubeconfig(tmp_path / "kubeconfig", str(server.make_url("")).rstrip("/"))
        api = await connect(lambda *_: None)
        try:
            assert await api.get("Node", None, "x") is not None
        finally:
            await api.close()
    assert sent == [None]


async def test_kubeconfig_overrides_in_cluster_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a controller that somebody points to another cluster, as tests do, would change the one that it is in."""
    for name in ("SERVICE_TOKEN_FILENAME", "SERVICE_CERT_FILENAME"):
        (tmp_path / name).write_text("of the pod")
        monkeypatch.setattr(incluster_config, name, str(tmp_path / name))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")

    async def node(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"name": "x"}})

    application = web.Application()
    application.router.add_get("/api/v1/nodes/x", node)
    async with TestServer(application) as server:
        url = str(server.make_url("")).rstrip("/")
        monkeypatch.setenv("KUBECONFIG", b.kubeconfig(tmp_path / "kubeconfig", url))
        api = await connect(lambda *_: None)
        try:
            assert await api.get("Node", None, "x") is not None
        finally:
            await api.close()


IMAGES = {"images": [{"names": ["a"]}], "phase": "x"}
PODS = [{"metadata": {"name": str(number), "managedFields": ["much"]}, "status": IMAGES} for number in range(1_200)]


async def _listing(use: Callable[[Api], Awaitable[Any]]) -> tuple[Any, list[dict[str, str]]]:
    """What a use of a client makes of 1,200 pods, and the queries that it sent."""
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        queries.append(dict(request.query))
        first, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        more = {"continue": str(first + limit)} if first + limit < len(PODS) else {}
        page = PODS[first : first + limit]
        return web.json_response({"items": page, "metadata": {"resourceVersion": "7", **more}})

    async with connected(web.get("/{path:.*}", answer)) as api:
        return await use(api), queries


async def everything(api: Api, kind: str) -> list[Any]:
    """All objects of a kind with our label."""
    pages = api.pages(kind, None, labels="app.kubernetes.io/managed-by=stage2", fields=None)
    return [item async for page in pages for item in page["items"]]


def test_lists_are_read_in_pages() -> None:
    listed, queries = asyncio.run(_listing(lambda api: everything(api, "Pod")))
    assert [item["metadata"]["name"] for item in listed] == [str(number) for number in range(1_200)]
    assert [query.get("continue") for query in queries] == [None, *map(str, range(200, 1_200, 200))]
    assert {query["labelSelector"] for query in queries} == {"app.kubernetes.io/managed-by=stage2"}


@pytest.mark.parametrize("kind", [names.KIND, "Node"])
def test_large_kinds_are_listed_in_small_pages(kind: str) -> None:
    found, queries = asyncio.run(_listing(lambda api: everything(api, kind)))
    assert len(found) == len(PODS)
    assert {query["limit"] for query in queries} == {"50"}


def test_pages_are_requested_lazily() -> None:
    async def first(api: Api) -> int:
        async for page in api.pages("Pod", None, labels=None, fields="status.phase!=Failed"):
            return len(page["items"])
        return 0

    length, queries = asyncio.run(_listing(first))
    assert (length, len(queries)) == (200, 1)
    assert queries[0]["fieldSelector"] == "status.phase!=Failed"


def test_events_are_requested_only_for_single_object_and_reason() -> None:
    _, queries = asyncio.run(_listing(lambda api: api.events_of("team-a", "u", "FailedCreate")))
    (query,) = queries
    assert query["fieldSelector"] == "involvedObject.uid=u,reason=FailedCreate"
    assert query["limit"] == "100"


@pytest.mark.parametrize(("reason", "answer"), [("AlreadyExists", None), ("Conflict", "quota was written meanwhile")])
def test_only_already_exists_is_tolerated_on_creation(reason: str, answer: str | None) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"reason": reason, "message": "quota was written meanwhile"}, status=409)

    async def create() -> str | None:
        async with connected(web.post("/api/v1/namespaces/team-a/configmaps", refuse)) as api:
            try:
                assert await api.create({"kind": "ConfigMap", "metadata": {"name": "x", "namespace": "team-a"}}) is None
            except ApiRefused as error:
                return error.message
        return None

    assert asyncio.run(create()) == answer


def test_request_path_depends_on_kind_and_escapes_name() -> None:
    assert path("Secret", "n", "x") == "/api/v1/namespaces/n/secrets/x"
    assert path("NetworkPolicy", "n") == "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies"
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    assert path("PriorityClass", None, "high") == f"{classes}/high"
    assert path("PriorityClass", None, "../x?watch=true&a=%2F#") == f"{classes}/..%2Fx%3Fwatch%3Dtrue%26a%3D%252F%23"
    assert path("Pod", "a/../b") == "/api/v1/namespaces/a%2F..%2Fb/pods"
    for name in (".", ".."):
        with pytest.raises(ValueError, match="is no name of a PriorityClass"):
            path("PriorityClass", None, name)


async def test_repeated_event_is_counted_instead_of_created_again() -> None:
    there: dict[str, Any] = {}

    async def create(request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        taken = name in there
        there.setdefault(name, body)
        return web.json_response({"reason": "AlreadyExists"} if taken else body, status=409 if taken else 201)

    async def read(request: web.Request) -> web.Response:
        return web.json_response(there[request.match_info["name"]])

    async def patch(request: web.Request) -> web.Response:
        there[request.match_info["name"]] |= await request.json()
        return web.json_response({})

    where = "/api/v1/namespaces/team-a/events"
    one = f"{where}/{{name}}"
    full, lost = (Event("Warning", reason, "the node has no room") for reason in ("NodeFull", "NodeLost"))
    long = "n" * 199 + "-and-more"
    async with connected(web.post(where, create), web.get(one, read), web.patch(one, patch)) as api:
        for event, job, at in (
            (full, b.job(), "1"),
            (lost, b.job(), "2"),
            (full, b.job(long), "3"),
            (full, b.job(), "4"),
        ):
            await api.emit(job, event, at=at)
    assert [name.rpartition(".")[0] for name in there] == ["job-3v1", "job-3v1", "n" * 199]
    keys = ("reason", "count", "firstTimestamp", "lastTimestamp")
    assert [tuple(body[key] for key in keys) for body in there.values()] == [
        ("NodeFull", 2, "1", "4"),
        ("NodeLost", 1, "2", "2"),
        ("NodeFull", 1, "3", "3"),
    ]
