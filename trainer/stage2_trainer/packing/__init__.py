"""Which segments share a row: exact choices from lengths alone, with nothing known of what has them."""

from stage2_trainer.packing.buffer import PackingBuffer, Selected, select_segments
from stage2_trainer.packing.errors import PackingError
from stage2_trainer.packing.window import pack_window

__all__ = ["PackingBuffer", "PackingError", "Selected", "pack_window", "select_segments"]
