"""What waits for a row comes back as it was, and a file that somebody else has made runs nothing."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.data.encode import Encoding
from stage2_trainer.learner.padding_free_batch import Placed, Segment
from stage2_trainer.learner.rows import PARTS, load_waiting, save_waiting
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.matching import SegmentMeta


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def segment():
    ids = torch.arange(7)
    encoding = Encoding(ids, torch.zeros_like(ids), torch.rand(4, 3), torch.tensor([[1, 2, 2]]), 4, 2)
    meta = SegmentMeta((1, 2, 3, 4), 1, 2, 1, 7, (0,), (500,), (), plain_coords=True, weights=((1, -0.5),))
    stats = SampleStats(4, 2, False, 1, 0, 0, 1, 1, 1, 0, 0.75, 1, staleness=3)
    return Segment(Placed(encoding, torch.arange(28).reshape(4, 7)), meta, stats, ("a.png",), "train.jsonl:3")


def flat(value):
    """All fields of a dataclass and of those within it, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {type(value).__name__: [flat(getattr(value, field.name)) for field in fields(value)]}
    return value


def test_a_segment_comes_back_as_it_was(tmp_path):
    save_waiting(tmp_path, [segment()])
    (found,) = load_waiting(tmp_path)
    assert flat(found.meta) == flat(segment().meta)
    assert flat(found.stats) == flat(segment().stats)
    assert (found.images, found.sample_id) == (("a.png",), "train.jsonl:3")
    assert torch.equal(found.placed.position_ids, segment().placed.position_ids)
    assert {type(part) for part in (found, found.placed, found.placed.encoding, found.meta, found.stats)} == set(PARTS)


def test_a_file_that_names_anything_else_is_refused_before_it_runs(tmp_path):
    made = tmp_path / "made"
    torch.save([Harmful(str(made))], tmp_path / "waiting-00000.pt")
    with pytest.raises(ConfigError, match=r"waiting-00000\.pt must hold tensors and settings only.*posix\.mkdir"):
        load_waiting(tmp_path)
    assert not made.exists()
