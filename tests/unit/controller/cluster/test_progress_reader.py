"""A learner's progress: read over real HTTP on the loopback address, beside the passes, which never wait for it."""

import asyncio
import base64
import contextlib
import copy
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stage2_api.pod import layout
from stage2_controller.cluster import progress
from stage2_controller.cluster.progress import ProgressPolls, ProgressReader, Unreachable
from stage2_controller.job import credentials, names
from stage2_controller.job.names import Key
from stage2_controller.job.settings import Settings
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n

SECRET = {"data": {layout.TOKEN_KEY: base64.b64encode(b"t0ken").decode()}}
POD = {**b.learner_pod(), "status": {**b.learner_pod()["status"], "podIP": "127.0.0.1"}}
POD["metadata"] = {**POD["metadata"], "annotations": {names.ANNOTATION_JOB: "job-3v1"}}


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def asking(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[ProgressReader]:
    """A reader of a learner that answers so, whatever the path."""
    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    made = ProgressReader(port=runner.addresses[0][1])
    try:
        yield made
    finally:
        await made.close()
        await runner.cleanup()


@pytest.fixture
async def reader() -> AsyncIterator[ProgressReader]:
    """A reader of a learner that demands its token."""

    async def progress(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer t0ken":
            return web.json_response({}, status=401)
        return web.json_response(b.report(step=7).document())

    async with asking(progress) as made:
        yield made


async def test_progress_of_running_learner_is_read(reader: ProgressReader) -> None:
    report = await reader.read(POD, SECRET)
    assert report is not None
    assert report.step == 7


@pytest.mark.parametrize(
    ("pod", "secret", "why"),
    [
        (POD, {"data": {layout.TOKEN_KEY: base64.b64encode(b"another").decode()}}, "it answered 401"),
        ({**POD, "status": {**POD["status"], "podIP": "127.0.0.2"}}, SECRET, "Cannot connect"),
    ],
    ids=["refused", "nobody there"],
)
async def test_reason_for_missing_report_is_given(reader: ProgressReader, pod: Any, secret: Any, why: str) -> None:
    with pytest.raises(Unreachable, match=why):
        await reader.read(pod, secret)


REPORT = json.dumps(b.report(step=7).document()).encode()


HOSTILE = {
    "endless": (b" " * (300 << 10) + REPORT, {}),
    "compressed": (gzip.compress(REPORT), {"Content-Encoding": "gzip"}),
    "nested as deep as its bytes allow": (b"[" * (250 << 10), {}),
    "no JSON": (b"<html>", {}),
    "a list": (b"[" + REPORT + b"]", {}),
    "no text": (b"\xff\xfe", {}),
    "nothing": (b"", {}),
    "half a report": (REPORT[:-20], {}),
    "two reports": (REPORT + REPORT, {}),
    "a report in UTF-16": (REPORT.decode().encode("utf-16"), {}),
    "a step of 5,000 digits": (REPORT.replace(b'"step": 7', b'"step": ' + b"9" * 5000), {}),
    "nested inside of a report": (REPORT.replace(b'{"rollout_seed": 17}', b"[" * 9000 + b"]" * 9000), {}),
    "a step that is a text": (REPORT.replace(b'"step": 7', b'"step": "seven"'), {}),
}


@pytest.mark.parametrize(("body", "headers"), HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_answer_is_rejected(body: bytes, headers: dict[str, str]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    async with asking(answer) as reader:
        with pytest.raises(Unreachable):
            await reader.read(POD, SECRET)


async def test_redirect_is_not_followed() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/progress":
            raise web.HTTPFound("/elsewhere")
        return web.Response(body=REPORT)

    async with asking(answer) as reader:
        with pytest.raises(Unreachable):
            await reader.read(POD, SECRET)
    assert asked == ["/progress"]


async def test_endless_answer_is_cut_off_at_size_limit() -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the reader has gone
            while sent < 1 << 30:
                await response.write(b" " * 65536)
                sent += 65536
        return response

    async with asking(answer) as reader:
        with pytest.raises(Unreachable):
            await reader.read(POD, SECRET)
    assert sent < 64 << 20  # what sockets buffer, and no more


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
@pytest.mark.parametrize("after", ["nothing", "the head"])
async def test_slow_learner_is_cut_off_at_timeout(monkeypatch: pytest.MonkeyPatch, after: str, drips: bool) -> None:
    """On a socket of its own: it sends a byte again and again, or none, and never ends by itself."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" if after == "the head" else b""
    left = asyncio.Event()

    async def serve(reading: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        writing.write(head)
        with contextlib.suppress(ConnectionError):
            while not reading.at_eof():
                writing.write((b" " if head else b"H") if drips else b"")
                await writing.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reading.read(4096), 0.02)
        left.set()
        writing.close()

    monkeypatch.setattr(progress, "_TIMEOUT", aiohttp.ClientTimeout(total=0.5))
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader = ProgressReader(port=listening.sockets[0].getsockname()[1])
    with pytest.raises(Unreachable):
        await reader.read(POD, SECRET)
    await left.wait()  # the connection is closed, not kept
    await reader.close()
    listening.close()


async def test_read_timeout_is_shorter_than_poll_interval(reader: ProgressReader) -> None:
    polls = ProgressPolls(reader, lambda key: None, interval_s=Settings().progress_s)
    assert 0 < (progress._TIMEOUT.total or 0) < polls._fresh_s


@pytest.fixture(scope="module")
def held() -> dict[str, str]:
    """The Secret of job-3v1."""
    return credentials.new(names.certificate_hosts("job-3v1", "team-a"), datetime.now(UTC))


def as_secret(content: dict[str, str]) -> dict[str, Any]:
    data = {key: base64.b64encode(text.encode()).decode() for key, text in content.items()}
    return {"metadata": {"name": "job-3v1-token", "namespace": "team-a"}, "data": data}


async def test_learner_with_certificate_is_read_over_tls(held: dict[str, str], tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {held['token']}"
        return web.Response(body=REPORT)

    async with asking(answer, b.listening(tmp_path, held, "learner")) as reader:
        report = await reader.read(POD, as_secret(held))
    assert report is not None
    assert report.step == 7


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("another job's learner", "kubectl delete secret job-3v1-token -n team-a restarts the job with new ones"),
        ("a server of the job", "kubectl delete secret job-3v1-token -n team-a restarts the job with new ones"),
        ("somebody without a certificate", "SSL"),
    ],
)
async def test_token_is_sent_only_to_learner_with_certificate_of_its_job(
    held: dict[str, str], tmp_path: Path, who: str, why: str
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        return web.Response(body=REPORT)

    shown = credentials.new(names.certificate_hosts("job-3v1", "team-a"), datetime.now(UTC))
    context = {
        "another job's learner": b.listening(tmp_path, shown, "learner"),
        "a server of the job": b.listening(tmp_path, held, "rollout"),
        "somebody without a certificate": None,
    }[who]
    async with asking(answer, context) as reader:
        with pytest.raises(Unreachable, match=why):
            await reader.read(POD, as_secret(held))
    assert asked == []


class Learner:
    """Answers with what it is asked to, or hangs."""

    def __init__(self) -> None:
        self.report: Any = {"step": 1}
        self.asked = 0
        self.hangs = False

    async def read(self, pod: Any, secret: Any) -> Any:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    async def close(self) -> None:
        self.hangs = False


SERVERS = frozenset({("pod", "server-0", 0)})
RESTARTED = frozenset({("pod", "server-0", 1)})


class Stage:
    """Polls of one learner under a clock that stands still, and how often a pass was asked for."""

    def __init__(self) -> None:
        self.learner, self.reported, self.now = Learner(), 0, 0.0
        self.polls = ProgressPolls(self.learner, self._request_pass, interval_s=10.0, clock=lambda: self.now)
        self.pod = b.learner_pod(b.up("learner"))

    def _request_pass(self, key: Key) -> None:
        assert key == n.KEY
        self.reported += 1

    async def pass_(self, pod: Any = None, servers: Any = SERVERS) -> Any:
        """What a pass is given; then whatever was asked for is answered."""
        found = self.polls.latest(n.KEY, pod or self.pod, SECRET, servers)
        for _ in range(5):
            await asyncio.sleep(0)
        return found


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    await made.polls.close()


async def test_first_report_requests_pass_that_reads_it(stage: Stage) -> None:
    assert await stage.pass_() is None
    assert stage.reported == 1
    assert await stage.pass_() == {"step": 1}
    assert (stage.learner.asked, stage.reported) == (1, 1), "a fresh report is not asked for again"


async def test_old_report_is_refreshed_and_only_changed_report_requests_pass(stage: Stage) -> None:
    await stage.pass_()
    stage.now = 10.0
    assert await stage.pass_() == {"step": 1}
    assert (stage.learner.asked, stage.reported) == (2, 1)
    stage.now, stage.learner.report = 20.0, {"step": 2}
    assert await stage.pass_() == {"step": 1}
    assert (stage.learner.asked, stage.reported) == (3, 2)
    assert await stage.pass_() == {"step": 2}


async def test_hanging_learner_does_not_block_passes(stage: Stage) -> None:
    stage.learner.hangs = True
    for _ in range(3):
        assert await stage.pass_() is None
        stage.now += 10.0
    assert stage.learner.asked == 1


async def test_report_of_earlier_pod_is_ignored(stage: Stage) -> None:
    await stage.pass_()
    other = copy.deepcopy(stage.pod)
    other["metadata"]["uid"] = "another"
    assert await stage.pass_(other) is None
    assert await stage.pass_(other) == {"step": 1}


async def test_failed_read_yields_no_report_and_is_retried(stage: Stage) -> None:
    stage.learner.report = KeyError("token")
    assert await stage.pass_() is None
    stage.now, stage.learner.report = 10.0, {"step": 3}
    await stage.pass_()
    assert await stage.pass_() == {"step": 3}


@pytest.mark.parametrize(("answered", "limit"), [(True, 3), (False, 30)], ids=["trains", "starts"])
async def test_long_silent_learner_is_unreachable_until_it_answers(stage: Stage, answered: bool, limit: int) -> None:
    if answered:
        await stage.pass_()
    stage.learner.report = Unreachable("CERTIFICATE_VERIFY_FAILED")
    for _ in range(limit):
        assert stage.polls.unreachable(n.KEY) is None
        stage.now += 10.0
        await stage.pass_()
    assert stage.polls.unreachable(n.KEY) == "CERTIFICATE_VERIFY_FAILED"
    passes = stage.reported
    stage.now, stage.learner.report = stage.now + 10.0, {"step": 2}
    await stage.pass_()
    assert (stage.polls.unreachable(n.KEY), stage.reported) == (None, passes + 1)
    await stage.pass_(b.learner_pod(b.down("learner", 1)))
    assert stage.polls.unreachable(n.KEY) is None


async def test_learner_refusing_connections_after_reporting_is_unreachable_at_once(stage: Stage) -> None:
    """It is started again there. For half a minute the status said that it trained."""
    stage.learner.report = b.report(step=4)
    await stage.pass_()
    stage.now, stage.learner.report = 10.0, Unreachable("connection refused", unheard=True)
    await stage.pass_()
    assert (stage.polls.unreachable(n.KEY), await stage.pass_()) == ("connection refused", None)
    stage.now, stage.learner.report = 20.0, {"step": 0}
    await stage.pass_()
    assert stage.polls.unreachable(n.KEY) is None


@pytest.mark.parametrize("last", [b.report(step=10), b.report(phase="done"), b.report(phase="failed")])
async def test_finished_learner_refusing_connections_is_not_unreachable(stage: Stage, last: Any) -> None:
    stage.learner.report = last
    await stage.pass_()
    stage.now, stage.learner.report = 10.0, Unreachable("connection refused", unheard=True)
    await stage.pass_()
    assert stage.polls.unreachable(n.KEY) is None


async def test_learner_not_yet_listening_is_not_unreachable(stage: Stage) -> None:
    stage.learner.report = Unreachable("connection refused", unheard=True)
    await stage.pass_()
    assert stage.polls.unreachable(n.KEY) is None


async def test_new_pod_is_not_unreachable_because_of_earlier_pod(stage: Stage) -> None:
    await stage.pass_()
    stage.learner.report = Unreachable("timed out")
    for _ in range(3):
        stage.now += 10.0
        await stage.pass_()
    assert stage.polls.unreachable(n.KEY) is not None
    other = copy.deepcopy(stage.pod)
    other["metadata"]["uid"] = "another"
    stage.learner.hangs = True
    assert stage.polls.latest(n.KEY, other, SECRET, SERVERS) is None
    assert stage.polls.unreachable(n.KEY) is None


async def test_first_report_after_servers_changed_becomes_baseline(stage: Stage) -> None:
    """A report of before says nothing of which process a later one is about."""
    await stage.pass_()
    assert stage.polls.baseline(n.KEY, SERVERS) == {"step": 1}
    stage.learner.report = {"step": 2}
    assert await stage.pass_(servers=RESTARTED) == {"step": 1}, "asked at once, although the last report is fresh"
    assert stage.polls.baseline(n.KEY, SERVERS) is None
    stage.now, stage.learner.report = 10.0, {"step": 3}
    assert await stage.pass_(servers=RESTARTED) == {"step": 2}
    assert await stage.pass_(servers=RESTARTED) == {"step": 3}
    assert stage.polls.baseline(n.KEY, RESTARTED) == {"step": 2}, "what came later is news since"


async def test_answer_requested_before_servers_changed_is_not_baseline(stage: Stage) -> None:
    stage.learner.hangs = True
    await stage.pass_()
    stage.learner.hangs = False
    await stage.pass_(servers=RESTARTED)
    assert stage.learner.asked == 2
    assert stage.polls.baseline(n.KEY, RESTARTED) == {"step": 1}
    assert stage.polls.baseline(n.KEY, SERVERS) is None


async def test_unanswered_poll_keeps_baseline(stage: Stage) -> None:
    await stage.pass_()
    for report in (Unreachable("timed out"), {"step": 5}):
        stage.now, stage.learner.report = stage.now + 10.0, report
        await stage.pass_()
    assert stage.polls.baseline(n.KEY, SERVERS) == {"step": 1}


async def test_refused_connection_is_distinguished_from_error_answer(reader: ProgressReader) -> None:
    nobody = {**POD, "status": {**POD["status"], "podIP": "127.0.0.2"}}
    with pytest.raises(Unreachable) as refused:
        await reader.read(nobody, SECRET)
    assert refused.value.unheard
    wrong = {"data": {layout.TOKEN_KEY: base64.b64encode(b"another").decode()}}
    with pytest.raises(Unreachable) as answered:
        await reader.read(POD, wrong)
    assert not answered.value.unheard


async def test_report_age_counts_from_last_answer_of_current_learner(stage: Stage) -> None:
    assert stage.polls.report_age_s(n.KEY) is None
    await stage.pass_()
    stage.now, stage.learner.report = 10.0, Unreachable("no route to host")
    await stage.pass_()
    assert stage.polls.report_age_s(n.KEY) == 10.0
    stage.now = 40.0
    assert stage.polls.report_age_s(n.KEY) == 40.0
    other = copy.deepcopy(stage.pod)
    other["metadata"]["uid"] = "another"
    await stage.pass_(other)
    assert stage.polls.report_age_s(n.KEY) is None


async def test_concurrent_reads_are_limited(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.learner.hangs = True
    for index in range(progress._AT_ONCE + 5):
        stage.polls.latest(Key("team-a", f"job-{index}"), stage.pod, SECRET, SERVERS)
    for _ in range(5):
        await asyncio.sleep(0)
    assert stage.learner.asked == progress._AT_ONCE
