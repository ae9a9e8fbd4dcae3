"""Packing as a library: which segments share a row. Pure functions on lengths in tokens; no model, no trainer.

`select_segments` fills one row exactly and always takes the oldest segment; `PackingBuffer` keeps the rest.
`pack_window` spreads all segments of an accumulation window over exactly as many rows as it has micro-steps.
`HalvedRows` finds the rows of an optimizer step while its segments come, in any order; `fewest_rows` those of segments
that are there.
"""

from stage2_trainer.packing.buffer import PackingBuffer, Selected, select_segments
from stage2_trainer.packing.errors import PackingError
from stage2_trainer.packing.halves import HalvedRows, fewest_rows
from stage2_trainer.packing.window import pack_window

__all__ = ["HalvedRows", "PackingBuffer", "PackingError", "Selected", "fewest_rows", "pack_window", "select_segments"]
