"""Requests whose images have been looked at, for sources that are asked many at once: one bad image fails them all."""

from __future__ import annotations

from collections.abc import Sequence

from stage2_trainer.data.images import ImageError
from stage2_trainer.data.messages import image_fault
from stage2_trainer.wire.rollout import Refused, RolloutRequest


def readable(requests: Sequence[RolloutRequest], index: int) -> RolloutRequest | Refused:
    """Return a request all of whose images can be read, or what is wrong with one of them."""
    try:
        asked = requests[index]
    except ImageError as error:
        return Refused(error)
    fault = image_fault(asked.messages)
    return asked if fault is None else Refused(fault)
