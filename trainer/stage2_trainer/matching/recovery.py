"""Missed objects that further answers to the same prompt found: which they are, and which tokens they are taught by.

After the triage of the research line behind stage 2 ("one greedy, K-1 sampled; recovered misses x 2, 3: a miss found by
a sample weighs more"): what the model finds when it samples is within its reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stage2_trainer.matching.duplicates import duplicates, match_others
from stage2_trainer.matching.ground_truth import GroundTruth
from stage2_trainer.matching.options import MatchOptions
from stage2_trainer.matching.parse import parse_rollout
from stage2_trainer.matching.serialize import desc_value_spans
from stage2_trainer.matching.tokens import CoordVocab


def recovered_misses(
    answers: Sequence[Sequence[int]], gt: GroundTruth, missed: Sequence[int], vocab: CoordVocab, options: MatchOptions
) -> tuple[int, ...]:
    """Return which of the missed true objects at least one of these answers has, matched as the first answer was.

    answers: token ids. missed: indices into `gt.objects`; what is returned keeps their order.
    """
    found: set[int] = set()
    for ids in answers:
        if found.issuperset(missed):
            break
        said = parse_rollout(ids, vocab).valid_objects
        matching = match_others(said, gt.objects, duplicates(said, options.duplicate_iou), options)
        found.update(pair.gt for pair in matching.pairs)
    return tuple(one for one in missed if one in found)


def entry_tokens(ids: Sequence[int], vocab: CoordVocab) -> list[range]:
    """Return the tokens of each entry `"object_n": {...}` of a written text, in order.

    What leads on to an entry is part of it, the brace that closes the answer of none; a token belongs to the entry in
    which it begins.
    """
    aligned = vocab.align(list(ids))
    starts, begin, found = aligned.starts[:-1], 0, []
    for _, named in desc_value_spans(aligned.text):
        end = aligned.text.index("}", named) + 1  # geometry has no braces
        low, high = np.searchsorted(starts, [begin, end], side="left").tolist()
        found.append(range(low, high))
        begin = end
    return found
