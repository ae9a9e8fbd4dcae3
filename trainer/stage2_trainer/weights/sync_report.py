"""The report of a finished sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SyncReport:
    """One finished sync.

    version: what every server now reports (the optimizer step of the weights).
    seconds: wall time, from the first call to the last server's confirmation.
    bytes, tensors: sent to each server (not summed over servers; where servers were sent different amounts, the most).
    servers: base URLs of the servers that hold the version.
    everything: whether some server was sent the whole model.
    adapter: the name by which requests ask for these weights; None = the served weights themselves.
    transport: what carried them; "" = they did not leave the process.
    phases: seconds of each phase (see `SyncPhases`).
    """

    version: int
    seconds: float
    bytes: int
    tensors: int
    servers: tuple[str, ...]
    everything: bool = True
    adapter: str | None = None
    transport: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes that went out to all servers, by the time from the first packed to the last loaded; 0 = unknown."""
        moving = sum(self.phases.get(phase, 0.0) for phase in ("pack", "send", "load"))
        return self.bytes * len(self.servers) / moving / 1e9 if moving else 0.0
