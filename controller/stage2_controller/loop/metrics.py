"""What a controller shows over HTTP: /healthz (restart me?), /readyz (do I see the cluster?) and /metrics."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from stage2_api.job import LearnerSpec, RolloutSpec
from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.job.objects import value_at
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import Object, ended, role_of
from stage2_controller.state.store import Store

logger = logging.getLogger(__name__)
_RENEWAL_S = 60.0
_PASS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_RESULTS = ("done", "retry", "error")
_ROLLOUT, _LEARNER = RolloutSpec(), LearnerSpec()  # with the contract's defaults
_UNFINISHED = (reasons.PENDING, reasons.STARTING, reasons.RUNNING)
OF_JOB: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "stage2_job_phase": (
        "1: the phase, and the reason of the condition Training, or of Failed; one series for each job.",
        ("phase", "reason"),
    ),
    "stage2_job_problem": (
        "1 for each condition that a job which has not ended does not meet, and for NoLongerValid.",
        ("condition", "reason"),
    ),
    "stage2_job_gpus_held": ("GPUs of the job's pods that have a node.", ()),
    "stage2_job_first_step_seconds": (
        "Seconds from the start or last resume to the first optimizer step (status.firstStepTime).",
        (),
    ),
    "stage2_job_report_age_seconds": ("Seconds since the last report of the running learner.", ()),
    "stage2_job_server_restarts": ("Restarts of the server with the most restarts.", ()),
    "stage2_job_restarts": ("Restarts of the learner.", ()),
    "stage2_job_evictions": ("Evictions of the job's pods by the kubelet since its start or last resume.", ()),
    "stage2_job_step": ("Optimizer steps that are done.", ()),
    "stage2_job_max_steps": ("Optimizer steps of the whole run.", ()),
    "stage2_job_loss": ("Loss of the last optimizer step.", ()),
    "stage2_job_sync_seconds": ("Seconds of the last weight sync.", ()),
}
"""Text, and labels besides namespace and name, whose values are few."""


class Metrics:
    """The metrics of one controller.

    store: its jobs and their pods. report_age_s: returns the seconds since a job's learner last gave a report.
    """

    def __init__(self, store: Store, report_age_s: Callable[[Key], float | None] = lambda _: None) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.passes = Counter(
            "stage2_reconcile", "Passes over jobs, by result: done, retry or error.", ["result"], registry=self.registry
        )
        for result in _RESULTS:  # start at 0: Prometheus sees no increase in a counter that starts at 1
            self.passes.labels(result)
        self.pass_seconds = Histogram(
            "stage2_reconcile_seconds", "Seconds that a pass takes.", buckets=_PASS_BUCKETS, registry=self.registry
        )
        self.requests = Counter(
            "stage2_api_requests",
            "Requests to the API server besides watches, by verb, resource and code (0: no answer).",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.queue_depth = Gauge("stage2_queue_depth", "Jobs that wait for a pass.", registry=self.registry)
        self.loop_lag = Histogram(
            "stage2_event_loop_lag_seconds",
            "Seconds by which the event loop was late for a task, because something else blocked it.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )
        self.leads = Gauge("stage2_leader", "Whether this controller holds the Lease.", registry=self.registry)
        self.compared = Gauge(
            "stage2_watch_compared_age_seconds",
            "Seconds since the watches were last compared with a list.",
            registry=self.registry,
        )
        self.registry.register(_Jobs(store, report_age_s))

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Count one request; `code` 0 stands for no answer."""
        self.requests.labels(verb, resource, str(code)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Jobs:
    """The metrics of all jobs, computed on request from what the store holds."""

    def __init__(self, store: Store, report_age_s: Callable[[Key], float | None]) -> None:
        self._store = store
        self._report_age_s = report_age_s

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not read the jobs to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its values of all jobs."""
        families = {
            name: GaugeMetricFamily(name, text, labels=["namespace", "name", *more])
            for name, (text, more) in OF_JOB.items()
        }
        for job in self._store.all_of(names.KIND):
            key = Key(job["metadata"]["namespace"], job["metadata"]["name"])
            pods = self._store.all(kinds.POD.kind, key)
            for name, value, labels in _figures(job, pods, self._report_age_s(key)):
                families[name].add_metric([*key, *labels], value)
        yield from families.values()


def _figures(
    job: Object, pods: Iterable[Object], report_age_s: float | None
) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """Yield name, value and further labels of each metric that one job has."""
    status = job.get("status") or {}
    phase, found = status.get("phase", "New"), {item["type"]: item for item in status.get("conditions") or ()}
    why = found.get(reasons.TRAINING) or {}
    yield "stage2_job_phase", 1, (phase, why.get("reason", ""))
    for item in _problems(found) if phase in _UNFINISHED else ():
        yield "stage2_job_problem", 1, (item["type"], item["reason"])
    restarts = [server.get("restarts", 0) for server in status.get("servers") or ()]
    values = {
        "stage2_job_gpus_held": _gpus_held(job["spec"], pods),
        "stage2_job_first_step_seconds": _first_step_s(status),
        "stage2_job_report_age_seconds": report_age_s,
        "stage2_job_server_restarts": max(restarts, default=None),
        "stage2_job_restarts": status.get("restarts"),
        "stage2_job_evictions": status.get("evictions", 0),  # Prometheus sees no increase in what starts at 1
        "stage2_job_step": status.get("step"),
        "stage2_job_max_steps": status.get("maxSteps"),
        "stage2_job_loss": status.get("loss"),
        "stage2_job_sync_seconds": (status.get("sync") or {}).get("seconds"),
    }
    yield from ((name, value, ()) for name, value in values.items() if value is not None)


def _problems(by_type: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conditions that keep a job from training or from starting again. by_type: all of its conditions."""
    links = (by_type.get(kind) for _, kind in explanation.CHAIN)
    return [one for one in links if one and (one["status"] != "True" or one["reason"] == reasons.NO_LONGER_VALID)]


def _gpus_held(spec: Mapping[str, Any], pods: Iterable[Object]) -> int:
    """Return the GPUs of the pods that have a node."""
    if value_at(spec, "gpuResource") == "" and value_at(spec, "learner", "resourceClaimTemplate") is None:
        return 0  # the job runs on the CPU
    wide = spec.get("engine") == names.JOBSET
    of_pod = ("serversPerPod", _ROLLOUT.servers_per_pod) if wide else ("servers", _ROLLOUT.servers)
    of_role: dict[str | None, int] = {
        names.ROLE_ROLLOUT: _count(spec, "rollout", *of_pod)
        * _count(spec, "rollout", "gpusPerServer", _ROLLOUT.gpus_per_server),
        names.ROLE_LEARNER: _count(spec, "learner", "gpus", _LEARNER.gpus),
    }
    return sum(of_role.get(role_of(pod), 0) for pod in pods if pod["spec"].get("nodeName") and not ended(pod))


def _count(spec: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """Return a number of the spec, or its default: the API server writes none into a section that is absent."""
    value = value_at(spec, section, key)
    return value if isinstance(value, int) else default


def _first_step_s(status: Mapping[str, Any]) -> float | None:
    start, first = status.get("startTime"), status.get("firstStepTime")
    return (conditions.instant(first) - conditions.instant(start)).total_seconds() if start and first else None


async def serve(
    problem: Callable[[], str | None],
    not_ready: Callable[[], str | None],
    figures: Callable[[], bytes],
    address: tuple[str, int],
    tls: Path | None = None,
) -> web.AppRunner:
    """Listen until the runner is cleaned up.

    problem, not_ready: return a sentence, or None. figures: the metrics. tls: the folder of a certificate and its key,
    which are read again every minute, because they are renewed while the controller runs.

    Raises:
        BadCertificate: the folder lacks them, or they do not fit.
        OSError: the address is not free.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _response(problem())

    async def readyz(_: web.Request) -> web.Response:
        return _response(not_ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=figures(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    context = _context(tls, application) if tls else None
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, *address, ssl_context=context).start()
    return runner


class BadCertificate(Exception):
    """A certificate and its key cannot be read, or do not fit."""


def _context(tls: Path, application: web.Application) -> ssl.SSLContext:
    """Return a context with the certificate of a folder, which the application reads again while it runs."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
    except OSError as error:  # ssl.SSLError is one
        raise BadCertificate(str(error)) from None

    async def renew() -> None:
        while True:
            await asyncio.sleep(_RENEWAL_S)
            try:
                context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
            except OSError as error:  # half written: the next minute has both
                logger.warning("--tls: %s cannot be read, so the previous certificate stays in use: %s", tls, error)

    async def renewing(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(renew())
        yield
        task.cancel()

    application.cleanup_ctx.append(renewing)
    return context


def _response(problem: str | None) -> web.Response:
    return web.Response(text=problem or "ok", status=500 if problem else 200)
