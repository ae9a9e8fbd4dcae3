"""The controller's process: it leads or stands by, answers probes, measures its loop, and ends when it cannot work."""

import asyncio
import shutil
import ssl
import sys
import time
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf
import pytest

from stage2_controller.cluster.election import Election
from stage2_controller.cluster.watches import WentBack
from stage2_controller.job import names
from stage2_controller.job.names import Key
from stage2_controller.loop import controller as loop_controller
from stage2_controller.loop import main, metrics, operator
from stage2_controller.loop.controller import Controller
from stage2_controller.loop.metrics import Metrics
from stage2_controller.loop.work_queue import WorkQueue
from stage2_controller.state.store import Store
from tests.support import certificates
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.cluster.test_election import Leases
from tests.unit.controller.place.test_capacity import free


class Idle:
    """A reconciler that has nothing to do, watches that see nothing, and nobody who is asked."""

    async def try_lists(self) -> None:
        """Nothing is refused."""

    async def fill(self) -> None:
        """Nothing exists."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""


def controller(reconciler: Any, *, leases: Leases | None = None, identity: str = "a") -> Controller:
    store, idle = Store(), Idle()
    anything: Any = Controller
    made: Controller = anything(
        api=idle,
        store=store,
        queue=WorkQueue(reconciler),
        reconciler=reconciler,
        watches=idle,
        metrics=Metrics(store),
        progress=idle,
        election=Election(leases, name="stage2", namespace="stage2-system", identity=identity) if leases else None,
    )
    return made


class Listing(Idle):
    """Something that notes whether it was asked to list what exists."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()

    async def fill(self) -> None:
        self.listed.set()

    def problem(self) -> str | None:
        """All is well."""


async def test_only_leader_lists_objects_and_standby_does_after_takeover() -> None:
    leases = Leases()
    first, second = (controller(Idle(), leases=leases, identity=name) for name in ("a", "b"))
    lists = [Listing(), Listing()]
    for one, watches in zip((first, second), lists, strict=True):
        one.watches = cast("Any", watches)
    await first.start()
    assert not is_ready(second), "it does not know yet that it may ask for the Lease"
    standing_by = asyncio.create_task(second.start())
    while not is_ready(second):
        await asyncio.sleep(0.01)
    assert not standing_by.done()
    assert [one.listed.is_set() for one in lists] == [True, False]
    assert "stage2_watch_compared_age_seconds 0.0" in second.figures().decode()
    await first.stop()
    await asyncio.wait_for(lists[1].listed.wait(), timeout=10)
    assert second.ready
    await second.stop()


def is_ready(made: Controller) -> bool:
    """Whether the readiness probe of a controller passes."""
    return made.not_ready() is None


async def test_standby_without_lease_answers_becomes_unready_and_is_then_restarted() -> None:
    leases = Leases()
    first, made = controller(Idle(), leases=leases), controller(Idle())
    await first.start()
    assert leases.lease
    now = [0.0]
    made.election = Election(leases, name="stage2", namespace="s", identity="b", clock=lambda: now[0])
    standing_by = asyncio.create_task(made.start())
    while not is_ready(made):
        await asyncio.sleep(0.01)
    leases.away = True
    now[0] = 14.0
    assert is_ready(made)
    now[0] = 100.0
    assert made.not_ready() == "no answer about the Lease for 100 s"
    assert made.problem() is None
    now[0] = 601.0
    assert made.problem() == "no answer about the Lease for 601 s"
    standing_by.cancel()
    await asyncio.gather(standing_by, return_exceptions=True)
    await first.stop()


async def test_standby_is_unready_until_leader_renews_lease() -> None:
    """`helm uninstall` takes the rights by which a leader gives its Lease up; `install --wait` came back too early."""
    leases = Leases()
    gone = controller(Idle(), leases=leases, identity="of the release before")
    await gone.start()
    for task in gone._tasks:
        task.cancel()
    made, now = controller(Idle()), [0.0]
    made.watches = cast("Any", Listing())
    made.election = Election(leases, name="stage2", namespace="s", identity="b", clock=lambda: now[0])
    standing_by = asyncio.create_task(made.start())
    while made.election is not None and not made.election.heard:
        await asyncio.sleep(0.01)
    assert made.not_ready() == "waits for the Lease: nobody has renewed it yet"
    assert made.problem() is None
    now[0] = 15.0
    await asyncio.wait_for(standing_by, timeout=10)
    assert is_ready(made)
    await made.stop()


class Blind(Idle):
    """What is refused every list, or each but the first small one."""

    def __init__(self, *, tries_well: bool) -> None:
        self.tries_well = tries_well

    async def try_lists(self) -> None:
        if not self.tries_well:
            await self.fill()

    async def fill(self) -> None:
        raise TimeoutError("lists are away")


async def test_standby_that_cannot_list_is_unready_and_does_not_take_lease() -> None:
    leases = Leases()
    made = controller(Idle(), leases=leases)
    made.watches = cast("Any", Blind(tries_well=False))
    assert made.not_ready() == "does not know yet what exists"
    for _ in range(2):
        with pytest.raises(kopf.TemporaryError, match="lists are away"):
            await made.start()
    assert leases.lease is None
    assert made.not_ready() == "cannot list what exists: lists are away"
    await made.stop()


async def test_leader_that_cannot_list_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases()
    made = controller(Idle(), leases=leases)
    made.watches = cast("Any", Blind(tries_well=True))
    with pytest.raises(kopf.TemporaryError):
        await made.start()
    assert made.problem() is None, "it may pass"
    monkeypatch.setattr(loop_controller, "_BLIND_S", 0.0)
    assert made.problem() == "cannot list what exists: lists are away"
    await made.stop()
    assert leases.lease is not None
    assert leases.lease["spec"]["holderIdentity"] == ""


class Deaf(Listing):
    """Watches that hear nothing."""

    def problem(self) -> str:
        return "no whole list"


async def test_controller_with_stale_lists_is_neither_alive_nor_ready() -> None:
    made = controller(Idle())
    made.watches = cast("Any", Deaf())
    await made.start()
    assert (made.problem(), made.not_ready()) == ("no whole list", "no whole list")
    await made.stop()


class Restored(Listing):
    """Watches of an API server whose etcd was restored."""

    async def run(self) -> None:
        raise ExceptionGroup("watches", [WentBack("pods: version 99 after 100")])


async def test_controller_restarts_when_api_server_was_restored_from_backup(caplog: pytest.LogCaptureFixture) -> None:
    """It went on with a world that never was, and its /healthz said that all was well."""
    made = controller(Idle())
    made.watches = cast("Any", Restored())
    await made.start()
    await asyncio.wait_for(made.stop_flag.wait(), timeout=60)
    assert "the API server was restored from a backup (pods: version 99 after 100): restarting" in caplog.text
    assert "bug" not in caplog.text
    assert (operator.why_ended(made) or "").endswith("everything has to be listed anew")
    await made.stop()


def put_job(made: Controller) -> None:
    """A job `job` that the controller knows."""
    made.store.put(names.KIND, {"metadata": {"name": "job", "namespace": "n", "uid": "j", "resourceVersion": "1"}})


def report(made: Controller, kind: str, change: str, body: Any, version: str = "1", **metadata: Any) -> None:
    """What a watch reports of an object of that job."""
    own = {"name": "x", "namespace": "n", "uid": "u", "annotations": {names.ANNOTATION_JOB: "job"}}
    there = {**body, "metadata": {**own, "resourceVersion": version, **metadata}}
    made.observe(kind, cast("Any", {"type": change, "object": there}))


async def test_events_of_deleted_job_cause_no_work() -> None:
    made = controller(Idle())
    report(made, "Service", "MODIFIED", {}, "2")
    assert made.queue.depth() == 0
    put_job(made)
    report(made, "Service", "DELETED", {}, "2")
    assert made.queue.depth() == 1


class Forgetful(Idle):
    """A reconciler that notes what it is asked to forget."""

    def __init__(self) -> None:
        self.forgotten: list[Key] = []

    def forget(self, key: Key) -> None:
        self.forgotten.append(key)


async def test_late_deletion_event_does_not_forget_recreated_job() -> None:
    reconciler = Forgetful()
    made = controller(reconciler)
    for uid, change in (("new", "ADDED"), ("old", "DELETED"), ("new", "DELETED")):
        assert reconciler.forgotten == []
        body = b.job()
        body["metadata"]["uid"] = uid
        made.observe(names.KIND, cast("Any", {"type": change, "object": body}))
    assert reconciler.forgotten == [n.KEY]


def test_pods_are_counted_from_watch_events() -> None:
    made = controller(Idle())
    made.capacity = n.capacity(n.node(gpus=8))
    made.observe("Pod", {"type": "ADDED", "object": n.foreign(gpus=2)})
    assert free(made.capacity) == 8


@pytest.mark.parametrize("replicas", [1, 2])
async def test_bug_in_worker_ends_process(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: object) -> None:
        raise AttributeError("a bug")

    made = controller(Idle(), leases=Leases() if replicas > 1 else None)
    monkeypatch.setattr(Idle, "run", fails)
    await made.start()
    await asyncio.wait_for(made.stop_flag.wait(), timeout=60)
    assert made.broken
    assert not made.lost
    await made.stop()


async def test_stopped_process_does_not_count_as_broken() -> None:
    made = controller(Idle())
    await made.start()
    await asyncio.sleep(0)
    await made.stop()
    assert not made.broken
    assert not made.stop_flag.is_set()
    assert operator.why_ended(made) is None


async def test_reason_for_end_of_controller_is_reported() -> None:
    made = controller(Idle())
    made.broken = True
    assert "a bug" in str(operator.why_ended(made))
    made.lost = True  # the other one leads, whatever else happened
    assert operator.why_ended(made) == "another controller leads now"


def test_broken_process_exits_with_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage2_controller.loop.operator.run", lambda *_: "a bug ended the controller")
    usual = sys.getrecursionlimit()
    try:
        with pytest.raises(SystemExit) as ended:
            main.main([])
    finally:
        sys.setrecursionlimit(usual)  # main raises it, for a process of its own
    assert ended.value.code == "a bug ended the controller"


async def test_long_event_loop_block_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_controller, "LOGGED_LAG_S", 0.2)
    late: asyncio.Queue[float] = asyncio.Queue()
    watching = asyncio.create_task(loop_controller.measure_lag(late.put_nowait))
    await late.get()
    time.sleep(0.5)  # by the clock: it blocks the loop
    while await late.get() < 0.3:
        pass
    watching.cancel()
    assert "was blocked" in caplog.text


async def answers(problem: str | None, not_ready: str | None) -> dict[str, tuple[int, str]]:
    store = Store()
    store.put(names.KIND, {**b.job(), "status": {"phase": "Running"}})
    figures = Metrics(store)
    figures.requested("get", "secrets", 200)
    runner = await metrics.serve(lambda: problem, lambda: not_ready, figures.text, ("127.0.0.1", 0))
    host, port = runner.addresses[0][:2]
    found = {}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for path in ("/healthz", "/readyz", "/metrics"):
            async with session.get(path) as response:
                found[path] = (response.status, await response.text())
    await runner.cleanup()
    return found


async def presented(address: tuple[str, int], trusted: certificates.Files) -> str:
    """Return the certificate that a server shows, and its answer over TLS."""
    context = ssl.create_default_context(cafile=trusted.authority)
    url = f"https://{certificates.HOST}:{address[1]}/healthz"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
        assert (response.status, await response.text()) == (200, "ok")
    return await asyncio.to_thread(ssl.get_server_certificate, address)


def as_secret(files: certificates.Files, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(files.certificate, folder / "tls.crt")
    shutil.copy(files.key, folder / "tls.key")
    return folder


async def test_metrics_are_served_over_tls_and_a_renewed_certificate_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics, "_RENEWAL_S", 0.05)
    old, new = certificates.make(tmp_path / "old"), certificates.make(tmp_path / "new")
    folder = as_secret(old, tmp_path / "secret")
    runner = await metrics.serve(lambda: None, lambda: None, lambda: b"", ("127.0.0.1", 0), folder)
    address = runner.addresses[0][:2]
    assert await presented(address, old) == old.certificate.read_text()
    as_secret(new, folder)
    while await asyncio.to_thread(ssl.get_server_certificate, address) != new.certificate.read_text():
        await asyncio.sleep(0.05)
    assert await presented(address, new) == new.certificate.read_text()
    await runner.cleanup()


@pytest.mark.parametrize("wrong", ["no folder", "another's key"])
async def test_invalid_metrics_certificate_ends_controller_with_one_line_message(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "secret"
    if wrong == "another's key":
        as_secret(certificates.make(tmp_path / "old"), folder)
        shutil.copy(certificates.make(tmp_path / "new").key, folder / "tls.key")
    with pytest.raises(metrics.BadCertificate, match=r"No such file|key values mismatch"):
        await metrics.serve(lambda: None, lambda: None, lambda: b"", ("127.0.0.1", 0), folder)


async def test_problem_makes_healthz_return_500() -> None:
    found = await answers("the watches are deaf", None)
    assert found["/healthz"] == (500, "the watches are deaf")
    assert found["/readyz"] == (200, "ok")


async def test_controller_without_lists_is_alive_but_not_ready() -> None:
    found = await answers(None, "does not know yet what exists")
    assert (found["/healthz"][0], found["/readyz"][0]) == (200, 500)


async def test_metrics_count_requests_and_jobs() -> None:
    lines = (await answers(None, None))["/metrics"][1].splitlines()
    assert 'stage2_api_requests_total{code="200",resource="secrets",verb="get"} 1.0' in lines
    assert 'stage2_job_phase{name="job-3v1",namespace="team-a",phase="Running",reason=""} 1.0' in lines
