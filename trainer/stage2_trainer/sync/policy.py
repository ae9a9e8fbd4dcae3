"""When and how weights are pushed: on demand, before fresh rollouts, never twice for one optimizer step."""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from torch import nn

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.sync.report import SyncReport
from stage2_trainer.sync.verify import Prover

logger = logging.getLogger(__name__)

SyncMode = Literal["full", "adapter", "auto"]
MODE_PATH = "custom.extra.rollout_matching.vllm.sync.mode"


class Sync(Protocol):
    """A way to bring servers up to date."""

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's weights, under `version`. Raises ServerError."""
        ...


def effective_mode(requested: SyncMode) -> Literal["full"]:
    """Return the mode that a run uses for a requested one.

    Raises:
        ConfigError: the mode is not built.
    """
    if requested == "adapter":
        raise ConfigError(
            (
                Problem(
                    path=MODE_PATH,
                    value=requested,
                    rule="adapter-only sync is not available in this version",
                    way_out="use `full`: it sends LoRA and DoRA merged, and needs no LoRA support on the server",
                ),
            )
        )
    if requested == "auto":
        logger.info("%s: auto resolves to full (adapter-only sync is not available in this version)", MODE_PATH)
    return "full"


class SyncPolicy:
    """Syncs at most once for each optimizer step.

    requested: the mode of the configuration; `effective` says what it resolved to.
    prover: proves syncs to have worked; None = no proofs.
    """

    def __init__(self, requested: SyncMode, *, full: Sync, prover: Prover | None = None) -> None:
        self.requested = requested
        self._prover = prover
        self.effective = effective_mode(requested)
        self._full = full
        self._synced_step: int | None = None

    def ensure_synced(self, model: nn.Module, global_step: int) -> SyncReport | None:
        """Push the weights if the servers do not hold those of `global_step` yet; None if they do.

        Raises:
            ServerError: some server does not hold them; the next call tries again.
            ProofError: a server answers with other weights, although it took the push.
        """
        if self._synced_step == global_step:
            return None
        self._synced_step = None
        report = self._full.sync(model, version=global_step)
        if self._prover is not None:
            self._prover.after_sync(model)
        self._synced_step = global_step
        logger.info(
            "weights of step %d on %d servers: %d tensors, %.1f MB each, %.2f s",
            global_step,
            len(report.servers),
            report.tensors,
            report.bytes / 1e6,
            report.seconds,
        )
        return report

    def invalidate(self) -> None:
        """Forget the last sync: a server came back empty, so the next call pushes again, and proves it."""
        self._synced_step = None
        if self._prover is not None:
            self._prover.demand()
