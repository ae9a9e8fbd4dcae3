"""What a push reports: its figures, where its time went, and how its proof ended. Importing it takes no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import field_validator

from stage2_api.pod.report import REASON_CHARACTERS, PhaseShares, SyncStatus

PHASES = ("connect", "begin", "pack", "send", "load", "finish", "prove")
MOVING = ("pack", "send", "load")
DIGITS = 3  # of a share or a speed; more mean nothing
RECORDED = {"merge", "merge_reason", "transport", "gigabytes_per_second", "phases", "version", "seconds", "proof_gap"}


class ProofError(RuntimeError):
    """A server answers with other weights than the learner's, although it took the push.

    A retry is pointless: the same push would end the same way.
    """


class DigestError(ProofError):
    """By its digests, a server has loaded other weights than the learner's; it generated nothing with them."""


class DoubtfulProof(ProofError):
    """A server's answers are farther from the learner's than rounding usually explains, but do not contradict them."""


@dataclass
class ProvedStep:
    """The newest optimizer step whose weights were proved to answer; None = none since this start.

    A checkpoint of that step, or of an older one, was trained on rollouts of the right weights.
    """

    step: int | None = None


class SyncReport(SyncStatus):
    """One finished push, or before the first one what is known of it: as the job's status shows it, and more.

    version: what every server now reports (the optimizer step of the weights); servers: those that hold it.
    seconds: wall time, from the first call to the last server's confirmation, without the proof.
    bytes, tensors: sent to each server (not summed over servers; where servers were sent different amounts, the most).
    everything: whether some server reloaded the whole model, from the wire or from its own folder.
    adapter: the name by which requests ask for these weights; None = the served weights themselves.
    wire_bytes: all that the learner handed to sockets, or to NCCL, for every worker of every server.
    phase_seconds: of each phase (see `server.Update`); `phases` has their shares.
    rounding_kept: the share of the adapters' update that survived rounding (`merge_math.kept_share`); None where there
    is no update. proof_gap: the mean difference of log-probabilities in the last proof; None before the first one.
    """

    requested_mode: str = "full"
    effective_mode: str = "full"
    bytes: int = 0
    tensors: int = 0
    everything: bool = True
    adapter: str | None = None
    wire_bytes: int = 0
    phase_seconds: Mapping[str, float] = {}
    rounding_kept: float | None = None
    proof_gap: float | None = None

    @field_validator("merge_reason", mode="before")
    @classmethod
    def _shortened(cls, reason: str | None) -> str | None:
        return reason[:REASON_CHARACTERS] if reason else None

    @classmethod
    def create(
        cls,
        version: int,
        seconds: float,
        servers: Sequence[str],
        *,
        wire_bytes: int = 0,
        phase_seconds: Mapping[str, float] | None = None,
        **more: Any,
    ) -> Self:
        """Return the report of a push that all of `servers` (base URLs) have taken. more: other fields."""
        moving = sum((phase_seconds or {}).get(phase, 0.0) for phase in MOVING)
        speed = float(f"{wire_bytes / moving / 1e9:.{DIGITS}g}") if moving else None
        report = cls(wire_bytes=wire_bytes, phase_seconds=phase_seconds or {}, gigabytes_per_second=speed, **more)
        return report.pushed(version, seconds, servers)

    def completed(self, *, requested: str, effective: str, prove_s: float | None = None) -> Self:
        """Return the report with the modes of the run, the time of the proof, and the share of each phase."""
        seconds = dict(self.phase_seconds) if prove_s is None else {**self.phase_seconds, "prove": prove_s}
        whole = max(self.seconds + (prove_s or 0.0), sum(seconds.values()))
        shares = {phase: round(taken / whole, DIGITS) for phase, taken in seconds.items()} if whole else {}
        changes = {"requested_mode": requested, "effective_mode": effective, "phase_seconds": seconds}
        return self.model_copy(update={**changes, "phases": PhaseShares(**shares) if shares else None})

    def summary(self) -> str:
        """Return the line of the log about this push."""
        return (
            f"weights of step {self.version} on {len(self.servers)} servers: {self._contents()},"
            f" {self.tensors} tensors, {self.bytes / 1e6:.1f} MB each, {self.seconds:.2f} s{self._transfer()}"
        )

    def _contents(self) -> str:
        if self.adapter is not None:
            return f"adapter {self.adapter}" + (" and base" if self.everything else "")
        if self.merge == "server":
            rest = "everything else from their own folders" if self.everything else "what else trains"
            return f"adapters, merged by the servers, and {rest}"
        return "everything" if self.everything else "what can have changed"

    def _transfer(self) -> str:
        """Return what carried the weights, how fast, and where the time went; "" if they stayed in the process."""
        if not self.transport:
            return ""
        shares = ", ".join(f"{phase} {took:.2f}" for phase, took in self.phase_seconds.items() if took >= 0.005)
        speed = self.gigabytes_per_second or 0.0
        return f" over {self.transport} at {speed:.2f} GB/s ({shares or 'no phase of note'})"

    def record(self) -> dict[str, Any]:
        """Return what rollouts.jsonl has of the push of an answer's weights."""
        figures = self.model_dump(include=RECORDED)
        return {"requested": self.requested_mode, "effective": self.effective_mode, **figures}


def sync_figures(report: SyncReport | None) -> dict[str, float | None]:
    """Return the figures of a push in a step's record, except the version. None: the step needed none."""
    done = report or SyncReport()
    return {
        "sync/seconds": done.seconds,
        "sync/bytes": float(done.bytes),
        "sync/wire_bytes": float(done.wire_bytes),
        "sync/gigabytes_per_second": done.gigabytes_per_second,
        **{f"sync/{phase}_s": done.phase_seconds.get(phase, 0.0) for phase in PHASES},
        "sync/rounding_kept": done.rounding_kept,
        "sync/proof_gap": done.proof_gap,
    }


def sync_words(report: SyncReport | None) -> dict[str, str]:
    """Return the words of a push in a step's record; "" where there was none, or nothing to report."""
    done = report or SyncReport()
    return {
        "sync/transport": done.transport or "",
        "sync/merge": done.merge or "",
        "sync/merge_reason": done.merge_reason or "",
    }
