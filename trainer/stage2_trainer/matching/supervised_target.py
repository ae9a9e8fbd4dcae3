"""The target of stage 1: the ground truth itself, whole, with nothing of the model's own before it."""

from __future__ import annotations

from stage2_trainer.matching.assign import Matching
from stage2_trainer.matching.ground_truth import GroundTruth
from stage2_trainer.matching.parse import ParsedRollout
from stage2_trainer.matching.serialize import serialize_objects
from stage2_trainer.matching.targets import MatchedTarget, read_tail
from stage2_trainer.matching.tokens import CoordVocab

_NO_ANSWER = ParsedRollout(
    prefix_ids=(),
    prefix_text="",
    objects=(),
    truncated=False,
    clean=True,
    max_object_index=None,
    dropped={},
    notes=(),
    text="",
)


def supervised_target(gt: GroundTruth, vocab: CoordVocab) -> MatchedTarget:
    """Return the whole answer as a tail without a prefix: structure and descriptions have cross entropy.

    A coordinate token that stands within a description is not trained on: it is no coordinate there.
    """
    text = serialize_objects(gt.objects)
    tail = vocab.encode(text)
    described, coord_pos, coord_bins = read_tail(tail, vocab)
    return MatchedTarget(
        parsed=_NO_ANSWER,
        ground_truth=gt,
        matching=Matching((), (), tuple(range(len(gt.objects))), 0, 0),
        y_train_ids=tuple(tail),
        prefix_len=0,
        prefix_text="",
        append_text=text,
        prefix_coord_pos=(),
        prefix_coord_target_bins=(),
        tail_ignore_pos=tuple(at for at in described if vocab.bin_of(tail[at]) is not None),
        tail_coord_pos=coord_pos,
        tail_coord_bins=coord_bins,
    )
