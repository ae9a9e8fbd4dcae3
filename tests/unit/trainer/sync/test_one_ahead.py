"""The next item is made while the present one is used, and never more than that."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from stage2_trainer.sync.vllm.server_merge import one_ahead

CPU = torch.device("cpu")
PATIENCE_S = 30.0


def test_prefetcher_keeps_order_of_items() -> None:
    assert list(one_ahead(iter(range(5)), CPU)) == [0, 1, 2, 3, 4]
    assert list(one_ahead(iter(()), CPU)) == []


def test_prefetcher_prepares_one_item_ahead() -> None:
    made = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    ahead = one_ahead(items(), CPU)
    next(ahead)
    assert made[1].wait(PATIENCE_S)
    assert not made[2].wait(0.2)  # by the clock: nothing may happen; a slow machine can only miss the defect
    ahead.close()  # type: ignore[attr-defined]
    assert not made[2].is_set()


def test_prefetcher_raises_error_of_item_to_consumer() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no such tensor")

    ahead = one_ahead(items(), CPU)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="no such tensor"):
        next(ahead)


def test_prefetcher_thread_ends_when_closed() -> None:
    ahead = one_ahead(iter(range(3)), CPU)
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("one-ahead")]
