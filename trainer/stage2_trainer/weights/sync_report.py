"""The report of a finished sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stage2_api.vllm import SyncMerge


@dataclass(frozen=True)
class SyncReport:
    """One finished sync.

    version: what every server now reports (the optimizer step of the weights).
    seconds: wall time, from the first call to the last server's confirmation.
    bytes, tensors: sent to each server (not summed over servers; where servers were sent different amounts, the most).
    servers: base URLs of the servers that hold the version.
    everything: whether some server was brought the whole model.
    adapter: the name by which requests ask for these weights; None = the served weights themselves.
    transport: what carried them; "" = they did not leave the process.
    phases: seconds of each phase (see `SyncPhases`).
    merge: where adapters were merged; None where nothing is.
    rounding_kept: the share of the adapters' update that survived rounding (`rounding.KeptUpdate`).
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
    merge: SyncMerge | None = None
    rounding_kept: float = 1.0

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes that went out to all servers, by the time from the first packed to the last loaded; 0 = unknown."""
        moving = sum(self.phases.get(phase, 0.0) for phase in ("pack", "send", "load"))
        return self.bytes * len(self.servers) / moving / 1e9 if moving else 0.0
