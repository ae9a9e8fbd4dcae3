"""How often a training step waits for its device: as often for many segments as for few.

On a CPU nothing waits, but the same calls are made: those that bring a tensor's values to Python.
"""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stage2_trainer.learner.rows import PackedRowPlanner
from tests.unit.trainer.learner.harness import box, build, record

READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__array__,
}  # fmt: skip
SIZES_UNKNOWN = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
OWN = "stage2_trainer/"


class Counted:
    """Reads of tensors by where they were made: our own code, or a library's."""

    def __init__(self) -> None:
        self.by = Counter()

    def note(self) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename]
        own = OWN in frames[-1].filename
        self.by["own" if own else "library", f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"] += 1

    def counts(self, whose: str) -> dict[str, int]:
        return {place: count for (found, place), count in self.by.items() if found == whose}


class PythonReads(TorchFunctionMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.counted.note()
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class OperatorReads(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in SIZES_UNKNOWN:
            self.counted.note()
        return function(*args, **(kwargs or {}))


@pytest.fixture
def reads_of_a_step(tmp_path, model, encoder, image_paths):
    """A function: the reads of one training step on so many records, packed into one row, once their tensors exist."""

    def count(records: int, micro_steps: int) -> Counted:
        objects = {f"object_{i}": box("red box", 100, 100 + 9 * i, 400, 600) for i in range(1, 1 + records)}
        some = [record(image_paths[i % len(image_paths)], i, **objects) for i in range(records * micro_steps)]
        rows = PackedRowPlanner(8000, capacity=64, min_fill=0.001)
        learner = build(
            tmp_path / f"{records}-{micro_steps}", model, encoder, some, rows=rows,
            per_device_train_batch_size=records, gradient_accumulation_steps=micro_steps,
        ).learner  # fmt: skip
        counted = Counted()

        def counting(method):
            def call(*args, **kwargs):
                with OperatorReads(counted), PythonReads(counted):
                    return method(*args, **kwargs)

            return call

        for owner, name in ((learner.passes, "train_rows"), (learner.log, "finish"), (learner, "_change_weights")):
            setattr(owner, name, counting(getattr(owner, name)))
        learner.train()
        return counted

    return count


def test_number_of_device_reads_does_not_grow_with_segments(reads_of_a_step):
    few, many = reads_of_a_step(1, 1), reads_of_a_step(4, 1)
    assert sum(many.counts("own").values()) == sum(few.counts("own").values()) <= 3, (few.by, many.by)
    assert many.counts("library") == few.counts("library")


def test_metrics_of_all_micro_steps_are_read_from_device_at_once(reads_of_a_step):
    one, three = reads_of_a_step(2, 1), reads_of_a_step(2, 3)
    assert sum(three.counts("own").values()) == sum(one.counts("own").values()), (one.by, three.by)
