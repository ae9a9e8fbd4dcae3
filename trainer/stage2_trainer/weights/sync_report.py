"""The report of a finished sync."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """One finished sync.

    version: what every server now reports (the optimizer step of the weights).
    seconds: wall time, from the first call to the last server's confirmation.
    bytes, tensors: sent to each server (not summed over servers; where servers were sent different amounts, the most).
    servers: base URLs of the servers that hold the version.
    everything: whether some server was sent the whole model.
    adapter: the name by which requests ask for these weights; None = the served weights themselves.
    """

    version: int
    seconds: float
    bytes: int
    tensors: int
    servers: tuple[str, ...]
    everything: bool = True
    adapter: str | None = None
