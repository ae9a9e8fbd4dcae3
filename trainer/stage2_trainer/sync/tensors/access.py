"""How the learner's weights are read. Those that ZeRO-3 spreads over processes are gathered in buckets.

DeepSpeed's parameters then have their whole shape in `ds_shape`, and this process's part in `ds_tensor`; their own data
is empty until they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from stage2_trainer.sync.tensors.announcement import DEFAULT_BUCKET_BYTES

T = TypeVar("T")


class WeightAccess:
    """Access to weights that are whole in this process. bucket_bytes: limit of what is gathered, and sent, at once."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make these parameters whole until the next call, which lets go of them."""

    def compute(self, work: Callable[..., T], model: Any, *arguments: Any) -> T:
        """Return `work(model, *arguments)`, which runs the model's forward pass."""
        return work(model, *arguments)


HERE = WeightAccess()


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, gathered or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_part(parameter: Tensor) -> Tensor:
    """Return what this process keeps of a parameter between gathers."""
    found: Tensor = getattr(parameter, "ds_tensor", parameter)
    return found
