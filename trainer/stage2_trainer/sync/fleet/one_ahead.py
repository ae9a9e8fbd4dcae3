"""An iterator whose next item is made while the present one is used.

A server merges a tensor while it proves and loads the one before, and reads its folder while a GPU computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
END: Any = object()


def one_ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Yield the items, of which a thread of its own makes the next: at most one more is held than is in use.

    device: on a GPU, what that thread does is queued on the caller's stream, so that an item's making comes before its
    use. What making an item raises is raised where it is asked for. A caller who stops waits for the item being made.
    """
    with _maker(device) as maker:
        coming = maker.submit(next, items, END)
        while (item := coming.result()) is not END:
            coming = maker.submit(next, items, END)
            yield item
            del item  # or two would be held while the next one is waited for


def _maker(device: torch.device) -> ThreadPoolExecutor:
    if device.type != "cuda":
        return ThreadPoolExecutor(1, "one-ahead")
    stream = torch.cuda.current_stream(device)
    return ThreadPoolExecutor(1, "one-ahead", torch.cuda.set_stream, (stream,))
