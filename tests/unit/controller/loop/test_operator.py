"""The process of the controller: why it cannot start, its lists, which come in pages, and kopf's watches."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import kopf
import pytest
from aiohttp import web

from stage2_controller.job import kinds
from stage2_controller.job.settings import Settings
from stage2_controller.loop import operator
from stage2_controller.loop.controller import Options
from tests.unit.controller import builders as b


def test_missing_cluster_error_names_kubeconfig(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    failure = operator.run(Settings(), Options())
    assert failure.startswith(f"KUBECONFIG: '{tmp_path / 'none'}'")
    assert "current context" in failure


def test_occupied_listen_address_error_names_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", b.kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failure = operator.run(Settings(), Options(listen=("127.0.0.1", port)))
    assert failure.startswith(f"--listen: 127.0.0.1:{port}: must be a free address")


KINDS = (*kinds.watched(kueue=True), kinds.NODE, kinds.RESOURCE_QUOTA)
SERVED = (*KINDS, kinds.Resource("Namespace", "v1", "namespaces"))  # kopf waits for it, and asks for none
PAGES = 3
LEASE = "/apis/coordination.k8s.io/v1/namespaces/stage2-system/leases/stage2"
EXPIRED = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {"continue": "inconsistent"},
    "status": "Failure",
    "message": "The provided continue parameter is too old to display a consistent list result.",
    "reason": "Expired",
    "code": 410,
}
"""What an API server answers when its store was compacted while a list was asked for page by page."""


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """What kopf leaves of a refused login is reported when it is collected: its traceback is parsed, here and now.

    Inside another test's `ast.parse` that would be an error of the interpreter (CPython 3.11, gh-106905).
    """
    yield
    gc.collect()


class Cluster:
    """An API server that has nothing, in three pages each, and notes every list that it is asked for."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, str | None]] = []  # the resource, and its page's limit
        self.watches: set[str] = set()
        self.asked: list[str] = []  # every path
        self.expires = False  # the first list of the controller's own client
        self.expired: set[str] = set()
        self.refuses_login_of = "nobody"  # what the client is called
        self.news: dict[str, bytes] = {}  # what a watch tells first, by resource

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.headers["User-Agent"].startswith(self.refuses_login_of):
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if request.path == LEASE:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "spec": {"holderIdentity": "another"}})
        resource = request.path.rpartition("/")[2]
        if resource not in {kind.plural for kind in KINDS}:
            return web.json_response(self._about(request.path))
        if request.query.get("watch"):
            self.watches.add(resource)
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(self.news.get(resource, b""))
            await asyncio.Event().wait()
            return answer
        self.lists.append((resource, request.query.get("limit")))
        if self._expires(resource, request):
            return web.json_response(EXPIRED, status=410)
        page = int(request.query.get("continue", "1"))
        more = {"continue": str(page + 1)} if page < PAGES else {}
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1", **more}, "items": []})

    def _expires(self, resource: str, request: web.Request) -> bool:
        """Whether the page is of a list that began before the last compaction: once."""
        is_ours = request.headers["User-Agent"].startswith("OpenAPI-Generator/")
        if not (self.expires and is_ours) or "continue" not in request.query or self.expired:
            return False
        self.expired.add(resource)
        return True

    @staticmethod
    def _about(path: str) -> object:
        """The groups that are served, or the resources of one."""
        _, _, version = path.partition("/apis/") if "/apis/" in path else path.partition("/api/")
        versions = {kind.api_version for kind in SERVED}
        if version in versions:
            served = [kind for kind in SERVED if kind.api_version == version]
            verbs = ["list", "watch", "get", "patch"]
            described = [
                {"name": kind.plural, "singularName": "", "kind": kind.kind, "namespaced": kind != kinds.NODE}
                for kind in served
            ]
            return {"kind": "APIResourceList", "resources": [{**one, "verbs": verbs} for one in described]}
        if path == "/apis":
            groups: dict[str, list[dict[str, str]]] = {}
            for one in sorted(versions - {"v1"}):
                name, _, number = one.partition("/")
                groups.setdefault(name, []).append({"groupVersion": one, "version": number})
            return {
                "groups": [
                    {"name": name, "versions": them, "preferredVersion": them[0]} for name, them in groups.items()
                ]
            }
        return {"versions": ["v1"]}


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Such an API server, to which KUBECONFIG leads."""
    made = Cluster()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # by the clock: watches stay open
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("KUBECONFIG", b.kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{port}", token="t"))
    yield made
    await runner.cleanup()


async def serve_until(done: Callable[[], bool], options: Options | None = None, *, kueue: bool = True) -> None:
    """Run a controller until something has happened."""
    running = asyncio.create_task(operator.serve(Settings(kueue=kueue), options or Options()))
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_every_list_request_has_page_limit(cluster: Cluster) -> None:
    await serve_until(lambda: len(cluster.watches) == len(KINDS))
    by_kind = {kind.plural: [limit for name, limit in cluster.lists if name == kind.plural] for kind in KINDS}
    assert {limit for limits in by_kind.values() for limit in limits} == {"50", "200", "500"}
    assert set(by_kind["nodes"]) == set(by_kind["rolloutmatchingjobs"]) == {"50"}, "large ones"
    for plural, limits in by_kind.items():
        times = 2 if plural == "rolloutmatchingjobs" else 1
        assert len(limits) >= times * PAGES, f"{plural}: by the controller at its start, and jobs by kopf too"


async def test_expired_list_page_restarts_listing(cluster: Cluster) -> None:
    cluster.expires = True
    await serve_until(lambda: len(cluster.watches) == len(KINDS))
    (plural,) = cluster.expired
    requested = [name for name, _ in cluster.lists if name == plural]
    assert len(requested) >= 2 * PAGES + 2, "two pages in vain"


async def test_standby_tries_each_list_once_then_requests_only_lease(cluster: Cluster) -> None:
    options = Options(lease=("stage2-system", "stage2"))
    await serve_until(lambda: cluster.asked.count(LEASE) >= 3, options)
    assert sorted(cluster.lists) == sorted((kind.plural, "1") for kind in KINDS)
    assert set(cluster.asked[cluster.asked.index(LEASE) :]) == {LEASE}


async def test_repeated_refused_credentials_end_kopf(cluster: Cluster) -> None:
    cluster.refuses_login_of = "kopf/"
    async with asyncio.timeout(30):
        with pytest.raises(kopf.LoginError):
            await operator.serve(Settings(), Options())
    assert len(cluster.asked) < 100


def test_only_exceptions_of_closing_generators_are_silenced(caplog):
    """As kopf's watches do, one of the generators raises while the loop's end closes it."""

    async def watch() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise RuntimeError("from a clean-up")

    async def one_event() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(operator.report_unless_closing)
        kept.append(watch())
        await anext(kept[0])
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    kept: list[AsyncIterator[int]] = []
    asyncio.run(one_event())
    assert "division by zero" in caplog.text
    assert "clean-up" not in caplog.text
