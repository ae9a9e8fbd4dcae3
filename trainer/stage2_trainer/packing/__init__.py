"""Packing as a library: which segments share a row. Pure functions on lengths in tokens; no model, no trainer.

`select_segments` fills one row exactly, with the oldest segment in it; `PackingBuffer` keeps the rest. `pack_window`
spreads all segments of an accumulation window over exactly as many rows as it has micro-steps. `HalvedRows` finds the
rows of an optimizer step while its segments come, in any order; `first_fit_decreasing` those of segments at hand.
"""

from stage2_trainer.packing.rows import (
    WAYS_TO_ROOM,
    HalvedRows,
    PackingBuffer,
    PackingError,
    Selected,
    first_fit_decreasing,
    select_segments,
)
from stage2_trainer.packing.window import pack_window

__all__ = [
    "WAYS_TO_ROOM",
    "HalvedRows",
    "PackingBuffer",
    "PackingError",
    "Selected",
    "first_fit_decreasing",
    "pack_window",
    "select_segments",
]
