"""The learner's figures for Prometheus, in the exposition format at GET /metrics (`STAGE2_METRICS_PORT`).

Figures of an optimizer step come from its record and stay until the next one that has them. A figure is missing until a
step has it, and a figure of nothing is NaN: both are gaps in charts. Phase and sync come from the reporter at each
request. They are not secret, and scrapers rarely carry tokens, so the route needs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, MetricsHandler
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stage2_api.pod.layout import METRICS_PORT_VARIABLE
from stage2_api.pod.report import LearnerPhase
from stage2_trainer.telemetry.progress import BoundedHTTPServer, Reporter
from stage2_trainer.telemetry.run_log import EventLog
from stage2_trainer.telemetry.timeline import PARTS

# Metric name -> key of the step's record, and what it means.
GAUGES = {
    "stage2_loss": ("loss", "Loss of the last optimizer step."),
    "stage2_rollout_tokens_per_second": ("rollout/gen_tokens_per_s", "Tokens generated per second of waiting."),
    "stage2_rollout_f1": ("rollout/f1", "F1 of the last step's rollouts against the ground truth."),
    "stage2_rollout_truncated_ratio": ("rollout/parse_truncated_rate", "Share of rollouts that end within the JSON."),
    "stage2_rollout_staleness_steps": ("rollout/staleness", "Optimizer steps from rollout to training on it, mean."),
    "stage2_packing_fill_ratio": ("packing/post_rollout_fill", "Share of packed rows that holds samples."),
    "stage2_packing_queue_segments": ("packing/post_rollout_buffer", "Samples that wait for a row."),
    "stage2_decode_steps_per_token": ("rollout/decode_steps_per_token", "Decode steps for each token, with drafts."),
    "stage2_draft_acceptance_ratio": ("rollout/draft_acceptance_rate", "Share of drafted tokens that were accepted."),
    "stage2_rollout_seconds": ("time/rollout_generate_s", "Seconds of the last step spent waiting for rollouts."),
    "stage2_step_seconds": ("step/wall_s", "Wall seconds of the last step."),
    "stage2_learner_idle_ratio": ("step/learner_idle_share", "Share of the step without forward, backward, optimizer."),
    "stage2_forward_seconds": ("time/forward_s", "Seconds of the last step's forward passes."),
    "stage2_peak_memory_bytes": ("memory/peak_bytes", "Peak memory of the accelerator."),
}
# Gauge name -> key in the record's `servers`, and what it means; one series a server.
SERVER_GAUGES = {
    "stage2_server_busy_ratio": ("busy_share", "Share of the last step in which the server had a request."),
    "stage2_server_requests_in_flight": ("in_flight", "Mean number of requests that the server had in the last step."),
}
# The same of the record's `drafts`. They have no series for a server that drafted nothing in the last step.
DRAFT_GAUGES = {
    "stage2_server_decode_steps_per_token": ("decode_steps_per_token", "Decode steps for each token of the server."),
    "stage2_server_draft_acceptance_ratio": (
        "draft_acceptance_rate",
        "Share of its drafted tokens that are accepted.",
    ),
}
POSITION_GAUGE = "stage2_server_draft_position_ratio"  # one series for each server and position in a draft
PART_GAUGE = "stage2_step_part_seconds"  # one series for each part of a step
# Counter name -> key of the step's record that is added to it, and what it means.
COUNTERS = {
    "stage2_sync_bytes": ("sync/bytes", "Bytes of weights sent to each server."),
    "stage2_sync_seconds": ("sync/seconds", "Seconds of weight syncs."),
    "stage2_rollout_tokens": ("rollout/gen_new_tokens_total", "Tokens generated."),
}
REUSED = "rollout/buffer_reuse"  # set in a step that repeats the counts of an earlier one's rollouts
OF_ROLLOUTS = frozenset({"rollout/gen_new_tokens_total"})


def metered(
    log: EventLog, reporter: Reporter, environment: Mapping[str, str], *, host: str, stack: ExitStack
) -> EventLog:
    """Serve metrics if a port is configured, and return the log that feeds them; `stack` closes the server."""
    port = environment.get(METRICS_PORT_VARIABLE)
    if not port or environment.get("RANK", "0") != "0":
        return log
    registry = CollectorRegistry()
    registry.register(ProgressCollector(reporter))
    handler = MetricsHandler.factory(registry)
    stack.enter_context(BoundedHTTPServer((host, int(port)), handler, name="metrics"))
    return MeteredLog(log, registry)


class MeteredLog:
    """An EventLog that also exports the figures of `step` events as metrics."""

    def __init__(self, log: EventLog, registry: CollectorRegistry) -> None:
        self._log = log
        # each is made in the first step that has its figure: before, it would say 0
        self._gauge = cache(partial(Gauge, registry=registry))
        self._counter = cache(partial(Counter, registry=registry))
        self._parts = Gauge(
            PART_GAUGE, "Wall seconds of the last step, by what it went to.", ["part"], registry=registry
        )
        self._servers, self._drafts = (
            {key: Gauge(name, help_, ["server"], registry=registry) for name, (key, help_) in gauges.items()}
            for gauges in (SERVER_GAUGES, DRAFT_GAUGES)
        )
        help_ = "Share of the server's drafts of which this position and all before it were accepted."
        self._positions = Gauge(POSITION_GAUGE, help_, ["server", "position"], registry=registry)

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Pass the event on, and export its figures."""
        self._log.write(event, figures)
        if event != "step":
            return
        for name, (key, help_) in GAUGES.items():
            if key in figures:
                self._gauge(name, help_).set(_number(figures[key]))
        for name, (key, help_) in COUNTERS.items():
            if key in figures:
                is_counted = key in OF_ROLLOUTS and figures.get(REUSED)
                self._counter(name, help_).inc(0.0 if is_counted else figures[key] or 0.0)
        for part in PARTS:
            if (key := f"step/{part}_s") in figures:
                self._parts.labels(part).set(_number(figures[key]))
        for server in figures.get("servers", ()):
            for key, gauge in self._servers.items():
                gauge.labels(server["server"]).set(server[key])
        self._export_drafts(figures.get("drafts", ()))

    def _export_drafts(self, drafts: Sequence[Mapping[str, Any]]) -> None:
        for gauge in (*self._drafts.values(), self._positions):
            gauge.clear()  # a position that no draft has reached in this step would keep its last share
        for one in drafts:
            if not one["drafted"]:
                continue
            for key, gauge in self._drafts.items():
                gauge.labels(one["server"]).set(one[key])
            for position, accepted in enumerate(one["accepted_by_position"] or (), start=1):
                self._positions.labels(one["server"], str(position)).set(accepted)

    def flush(self) -> None:
        """Return once everything logged is on disk."""
        self._log.flush()


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class ProgressCollector(Collector):
    """Reads step, phase and sync from the reporter at each request."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def collect(self) -> Iterator[Metric]:
        """Yield the current state; each phase is a series, 1 for the current one."""
        now = self._reporter.current
        yield GaugeMetricFamily("stage2_step", "Optimizer steps that are done.", value=now.step)
        yield GaugeMetricFamily("stage2_max_steps", "Optimizer steps of the run.", value=now.max_steps)
        phases = GaugeMetricFamily("stage2_phase", "What the learner is doing: 1 for that.", labels=["phase"])
        for phase in get_args(LearnerPhase):
            phases.add_metric([phase], float(phase == now.phase))
        yield phases
        if now.sync is not None:
            help_ = "Optimizer step whose weights the servers hold."
            yield GaugeMetricFamily("stage2_sync_version", help_, value=now.sync.version)
