"""What the scores of a checkpoint suggest to do next: the advice that `stage2 evaluate` ends with.

The thresholds and the gains behind each sentence are in docs/results.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stage2_trainer.data.object_order import ObjectOrder
from stage2_trainer.scores.answer_scores import WITHOUT_DUPLICATES

MOST_BROKEN = 0.03
LEAST_GAIN = 0.005
LEAST_F1 = 0.5  # between the starts that lost boxes (0.28) and those that did not (0.60 and more)


def summary(found: Mapping[str, Any]) -> str:
    """Return the shares of the mistakes in one sentence. found: a document of `AnswerScores`."""
    named = f", {1 - found['desc_exact']:.0%} of those in place have another description" if found["recall@0.5"] else ""
    broken = "" if math.isnan(found["parse_rate"]) else f", {1 - found['parse_rate']:.0%} of the answers are broken"
    return (
        f"mistakes: {1 - found['recall@0.5']:.0%} of the true objects are missed,"
        f" {found['duplicate_rate']:.0%} of the answered ones are duplicates{named}{broken}"
    )


def advice(found: Mapping[str, Any], order: ObjectOrder) -> Iterator[str]:
    """Yield what to do, the first thing first. order: of the objects in the records."""
    gain = found[WITHOUT_DUPLICATES]["f1@0.5"] - found["f1@0.5"]
    if found["parse_rate"] < 1 - MOST_BROKEN:
        yield (
            "continue stage 1, or raise max_new_tokens if the answers are only long: stage 2 and GRPO need a model"
            f" that breaks at most {MOST_BROKEN:.0%} of its answers"
        )
        return
    if gain >= LEAST_GAIN:
        yield f"remove duplicates from the answers where you use them: F1 rises by {gain:.3f} without training"
    if order.advice is not None:
        yield order.advice
    if order.is_missing:
        if found["f1@0.5"] < LEAST_F1:
            yield (
                f"continue stage 1 before stage 2: F1 is below {LEAST_F1}, and from such a start stage 2 improved names"
                " but lost boxes (docs/results.md)"
            )
    else:
        yield (
            "continue stage 1 while it improves; with annotations in an order, stage 2 has not been ahead of it"
            " (docs/results.md)"
        )
