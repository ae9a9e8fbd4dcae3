"""What a controller shows over HTTP: /healthz (restart me?), /readyz (do I see the cluster?) and /metrics."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from stage2_controller import conditions, reasons
from stage2_controller.observed import Object

_PASS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_RESULTS = ("done", "retry", "error")
_OF_JOB = {
    "stage2_job_step": ("Optimizer steps that are done.", "step"),
    "stage2_job_max_steps": ("Optimizer steps of the whole run.", "maxSteps"),
    "stage2_job_loss": ("Loss of the last optimizer step.", "loss"),
    "stage2_job_restarts": ("Times that the learner was started again.", "restarts"),
}


class Metrics:
    """The metrics of one controller. jobs: returns all jobs that it knows, as the API server holds them."""

    def __init__(self, jobs: Callable[[], Iterable[Object]]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.passes = Counter("stage2_reconcile", "Passes over jobs, by result.", ["result"], registry=self.registry)
        for result in _RESULTS:  # start at 0: Prometheus sees no increase in a counter that starts at 1
            self.passes.labels(result)
        self.pass_seconds = Histogram(
            "stage2_reconcile_seconds", "Seconds that a pass takes.", buckets=_PASS_BUCKETS, registry=self.registry
        )
        self.requests = Counter(
            "stage2_api_requests",
            "Requests to the API server, besides watches.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.queue_depth = Gauge("stage2_queue_depth", "Jobs that wait for a pass.", registry=self.registry)
        self.loop_lag = Histogram(
            "stage2_event_loop_lag_seconds",
            "Seconds by which the event loop was late for a task, since something else kept it.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )
        self.unplaced = Gauge("stage2_jobs_without_node", "Jobs that fit on no node.", registry=self.registry)
        self.leads = Gauge("stage2_leader", "Whether this controller holds the Lease.", registry=self.registry)
        self.compared = Gauge(
            "stage2_watch_compared_age_seconds",
            "Seconds since the watches were last compared with a list.",
            registry=self.registry,
        )
        self.registry.register(_Jobs(jobs))

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Count one request; `code` 0 stands for no answer."""
        self.requests.labels(verb, resource, str(code)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Jobs:
    """Metrics from the jobs' statuses, collected on request."""

    def __init__(self, jobs: Callable[[], Iterable[Object]]) -> None:
        self._jobs = jobs

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not read the jobs to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the jobs by phase, and the metrics of each."""
        labels = ["namespace", "name"]
        phases: Tally[str] = Tally()
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, _) in _OF_JOB.items()}
        seconds = GaugeMetricFamily("stage2_job_sync_seconds", "Seconds of the last weight sync.", labels=labels)
        phase_of = GaugeMetricFamily(
            "stage2_job_phase", "1 for the phase that the job is in.", labels=[*labels, "phase"]
        )
        unreachable = GaugeMetricFamily(
            "stage2_job_learner_unreachable", "1 while a running learner gives no report.", labels=labels
        )
        for job in self._jobs():
            status = job.get("status") or {}
            phase = status.get("phase", "New")
            phases[phase] += 1
            who = [job["metadata"]["namespace"], job["metadata"]["name"]]
            phase_of.add_metric([*who, phase], 1)
            for name, (_, key) in _OF_JOB.items():
                if status.get(key) is not None:
                    families[name].add_metric(who, status[key])
            if (status.get("sync") or {}).get("seconds") is not None:
                seconds.add_metric(who, status["sync"]["seconds"])
            reachable = conditions.find(status, reasons.LEARNER_REACHABLE)
            unreachable.add_metric(who, float(reachable is not None and reachable["status"] == "False"))
        by_phase = GaugeMetricFamily("stage2_jobs", "Jobs by phase.", labels=["phase"])
        for phase, count in phases.items():
            by_phase.add_metric([phase], count)
        yield from (by_phase, phase_of, seconds, unreachable, *families.values())


async def serve(
    problem: Callable[[], str | None],
    not_ready: Callable[[], str | None],
    figures: Callable[[], bytes],
    address: tuple[str, int],
) -> web.AppRunner:
    """Listen until the runner is cleaned up. problem, not_ready: return a sentence, or None. figures: the metrics."""

    async def healthz(_: web.Request) -> web.Response:
        return _response(problem())

    async def readyz(_: web.Request) -> web.Response:
        return _response(not_ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=figures(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, *address).start()
    return runner


def _response(problem: str | None) -> web.Response:
    return web.Response(text=problem or "ok", status=500 if problem else 200)
