"""The synchronization of weights: on demand, before fresh rollouts, never twice for one optimizer step."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Literal, Protocol

from torch import nn

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import SyncMerge
from stage2_trainer.sync.fleet.sync_report import SyncReport
from stage2_trainer.sync.fleet.verify import Prover
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

SyncMode = Literal["full", "adapter", "auto"]
EffectiveMode = Literal["full", "adapter"]
MODE_PATH = "custom.extra.rollout_matching.vllm.sync.mode"
ROUNDING_PATH = "custom.extra.rollout_matching.vllm.sync.rounding"
MOSTLY_LOST = 0.5  # of an update, below which the policy that answers is nearer to the base than to the one that trains
NO_LORA = "vllm.enable_lora is false"


class SyncMethod(Protocol):
    """A way to bring servers up to date."""

    @property
    def merge(self) -> SyncMerge | None:
        """Where adapters are merged; None = nothing is merged."""
        ...

    @property
    def merge_reason(self) -> str | None:
        """Why they are merged there."""
        ...

    @property
    def transport(self) -> str:
        """What carries the weights; "" = nothing that has a name."""
        ...

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's weights, under `version`. Raises ServerError."""
        ...


def resolve_mode(requested: SyncMode, *, enable_lora: bool, obstacle: str | None) -> EffectiveMode:
    """Return the mode that a run starts with, and say why `auto` does not become `adapter`.

    obstacle: why vLLM cannot serve what trains as an adapter; None if it can.

    Raises:
        ConfigError: adapter sync is asked for and cannot work.
    """
    reason = obstacle if enable_lora else NO_LORA
    if requested == "full":
        return "full"
    if reason is None:
        return "adapter"
    if requested == "auto":
        logger.info("%s: auto resolves to full: %s", MODE_PATH, reason)
        return "full"
    way_out = "set it to full, which sends adapters merged and needs no LoRA support on the server"
    raise ConfigError((Problem(MODE_PATH, requested, f"adapter-only sync cannot work: {reason}", way_out),))


class WeightSynchronizer:
    """A synchronizer that syncs at most once for each optimizer step.

    requested: the mode of the configuration; `effective` says what is in use.
    adapter: how adapters are sent; None = the run sends full weights.
    fallback: whether an adapter that servers refuse turns the rest of the run to full syncs, or is an error.
    prover: proves syncs to have worked; None = no proofs.
    """

    def __init__(
        self,
        requested: SyncMode,
        *,
        full: SyncMethod,
        adapter: SyncMethod | None = None,
        fallback: bool = True,
        prover: Prover | None = None,
    ) -> None:
        self.requested = requested
        self.adapter_name: str | None = None
        self._full = full
        self._adapter = adapter
        self._fallback = fallback
        self._prover = prover
        self._synced_step: int | None = None
        self._rounding_told = False

    @property
    def effective(self) -> EffectiveMode:
        """The mode in use."""
        return "full" if self._adapter is None else "adapter"

    @property
    def merge(self) -> SyncMerge | None:
        """Where adapters are merged; None = they are sent as they are."""
        return self._method.merge

    @property
    def merge_reason(self) -> str | None:
        """Why they are merged there."""
        return self._method.merge_reason

    @property
    def transport(self) -> str:
        """What carries the weights; "" = nothing that has a name."""
        return self._method.transport

    @property
    def _method(self) -> SyncMethod:
        return self._full if self._adapter is None else self._adapter

    def ensure_synced(self, model: nn.Module, global_step: int) -> SyncReport | None:
        """Push the weights if the servers do not hold those of `global_step` yet; None if they do.

        Requests must then ask for `adapter_name`.

        Raises:
            ServerError: some server does not hold them; the next call tries again.
            ProofError: a server answers with other weights, although it took the push.
        """
        if self._synced_step == global_step:
            return None
        self._synced_step = None
        report = self._sync(model, global_step)
        self.adapter_name = report.adapter
        if self._prover is not None:
            start = time.monotonic()
            self._prover.after_sync(model, step=global_step, adapter=report.adapter)
            report = replace(report, phases={**report.phases, "prove": time.monotonic() - start})
        self._synced_step = global_step
        logger.info(
            "weights of step %d on %d servers: %s, %d tensors, %.1f MB each, %.2f s%s",
            global_step,
            len(report.servers),
            _what(report),
            report.tensors,
            report.bytes / 1e6,
            report.seconds,
            _how(report),
        )
        self._tell_of_rounding(report)
        return report

    def _tell_of_rounding(self, report: SyncReport) -> None:
        """Warn, once, of servers that have less than half of what was learnt."""
        if report.rounding_kept < MOSTLY_LOST and not self._rounding_told:
            self._rounding_told = True
            logger.warning(
                "at step %d servers have %.0f %% of the adapters' update: the rest is lost in the rounding of merged"
                " weights, and rollouts come from an older policy; set %s to stochastic, or watch sync/rounding_kept"
                " grow",
                report.version,
                100 * report.rounding_kept,
                ROUNDING_PATH,
            )

    def invalidate(self) -> None:
        """Forget the last sync: a server came back empty, so the next call pushes again, and proves it."""
        self._synced_step = None
        if self._prover is not None:
            self._prover.require_next()

    def _sync(self, model: nn.Module, version: int) -> SyncReport:
        if self._adapter is None:
            return self._full.sync(model, version=version)
        try:
            return self._adapter.sync(model, version=version)
        except ServerError as error:
            refused = error.status is not None  # a server that is lost is waited for instead
            if not (refused and self._fallback):
                raise
            logger.warning("adapter sync failed, and the rest of the run uses full syncs: %s", error)
        self._adapter = None
        if self._prover is not None:
            self._prover.require_next()
        return self._full.sync(model, version=version)


def _what(report: SyncReport) -> str:
    if report.adapter is not None:
        return f"adapter {report.adapter}" + (" and base" if report.everything else "")
    if report.merge == "server":
        return "merged there, " + ("everything else from its own folder" if report.everything else "what trains")
    return "everything" if report.everything else "what can have changed"


def _how(report: SyncReport) -> str:
    """Return what carried the weights, how fast, and where the time went; nothing of what did not leave the process."""
    if not report.transport:
        return ""
    shares = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in report.phases.items() if seconds >= 0.005)
    return f" over {report.carrier} at {report.gigabytes_per_second:.2f} GB/s ({shares or 'no phase of note'})"
