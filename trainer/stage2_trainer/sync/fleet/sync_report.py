"""The report of a finished sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stage2_api.pod.report import REASON_CHARACTERS, ReportedShares, ReportedSync
from stage2_api.vllm import SyncMerge
from stage2_trainer.sync.fleet.sync_phases import PHASES

DIGITS = 3  # of a share, and behind the point of a speed: more tell nothing


@dataclass(frozen=True)
class SyncReport:
    """One finished sync.

    version: what every server now reports (the optimizer step of the weights).
    seconds: wall time, from the first call to the last server's confirmation.
    bytes, tensors: sent to each server (not summed over servers; where servers were sent different amounts, the most).
    servers: base URLs of the servers that hold the version.
    everything: whether some server was brought the whole model.
    adapter: the name by which requests ask for these weights; None = the served weights themselves.
    wire_bytes: all that the learner handed to sockets, or to NCCL, for every worker of every server.
    transport: what carried them; "" = they did not leave the process. ways: those that NCCL chose between members.
    phases: seconds of each phase (see `SyncPhases`).
    merge: where adapters were merged; None where nothing is. merge_reason: why there.
    rounding_kept: the share of the adapters' update that survived rounding (`rounding.KeptUpdate`).
    """

    version: int
    seconds: float
    bytes: int
    tensors: int
    servers: tuple[str, ...]
    everything: bool = True
    adapter: str | None = None
    wire_bytes: int = 0
    transport: str = ""
    ways: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    merge: SyncMerge | None = None
    merge_reason: str | None = None
    rounding_kept: float = 1.0

    @property
    def carrier(self) -> str:
        """What carried them, with the ways that NCCL chose where it says them; "" as `transport`."""
        return f"{self.transport} ({', '.join(self.ways)})" if self.ways else self.transport

    @property
    def gigabytes_per_second(self) -> float:
        """`wire_bytes` in 1e9 by the seconds from the first tensor packed to the last loaded; 0 = unknown."""
        moving = sum(self.phases.get(phase, 0.0) for phase in ("pack", "send", "load"))
        return self.wire_bytes / moving / 1e9 if moving else 0.0

    def shares(self) -> dict[str, float]:
        """Return the share of the sync's time, proof included, that each phase took; empty where none is known."""
        whole = max(self.seconds + self.phases.get("prove", 0.0), sum(self.phases.values()))
        return {phase: round(seconds / whole, DIGITS) for phase, seconds in self.phases.items()} if whole else {}

    def reported(self, before: ReportedSync, *, effective_mode: str) -> ReportedSync:
        """Return what the learner's report says of this sync. before: what it said of the last."""
        shares = self.shares()
        found = {
            "effective_mode": effective_mode,
            "merge": self.merge,
            "merge_reason": self.merge_reason[:REASON_CHARACTERS] if self.merge_reason else None,
            "transport": self.carrier or None,
            "gigabytes_per_second": round(self.gigabytes_per_second, DIGITS) if self.transport else None,
            "phases": ReportedShares(**shares) if shares else None,
        }
        return before.pushed(self.version, self.seconds, self.servers).model_copy(update=found)


def sync_figures(report: SyncReport | None) -> dict[str, float]:
    """Return the figures that a step's record has of its sync, but the version. None: the step needed none."""
    seconds: Mapping[str, float] = {} if report is None else report.phases
    return {
        "sync/seconds": 0.0 if report is None else report.seconds,
        "sync/bytes": 0.0 if report is None else float(report.bytes),
        "sync/wire_bytes": 0.0 if report is None else float(report.wire_bytes),
        "sync/gigabytes_per_second": 0.0 if report is None else report.gigabytes_per_second,
        **{f"sync/{phase}_s": seconds.get(phase, 0.0) for phase in PHASES},
        "sync/rounding_kept": 1.0 if report is None else report.rounding_kept,
    }


def sync_words(report: SyncReport | None) -> dict[str, str]:
    """Return what a step's record says of its sync in words; "" where there was none, or nothing to say."""
    if report is None:
        return {"sync/transport": "", "sync/merge": "", "sync/merge_reason": ""}
    reason = (report.merge_reason or "")[:REASON_CHARACTERS]
    return {"sync/transport": report.carrier, "sync/merge": report.merge or "", "sync/merge_reason": reason}
