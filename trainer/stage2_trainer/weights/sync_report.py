"""The report of a finished sync."""

from __future__ import annotations

from dataclasses import dataclass

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
    merge: SyncMerge | None = None
    rounding_kept: float = 1.0
