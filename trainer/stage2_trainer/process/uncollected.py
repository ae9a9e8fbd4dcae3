"""Imports of large libraries without garbage collections.

Modules are kept for good, so a collection while they are made finds next to nothing, and each walks over all that was
imported before. It takes a fourth of the CPU seconds of importing PyTorch, transformers and vLLM.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in a block that imports, and leave what it made out of later collections."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
