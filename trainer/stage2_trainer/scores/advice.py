"""What the scores of a checkpoint suggest to do next: the advice that `stage2 evaluate` ends with.

The thresholds and the gains behind each sentence are in docs/results.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stage2_api.rollout_matching import Runaway
from stage2_trainer.data.object_order import ObjectOrder
from stage2_trainer.scores.answer_scores import WITHOUT_DUPLICATES

MOST_BROKEN = 0.03
LEAST_GAIN = 0.005
MOST_OBJECTS = Runaway().objects_per_truth
LEAST_F1 = 0.5  # between the starts that lost boxes (0.28) and those that did not (0.60 and more)


def summary(found: Mapping[str, Any]) -> str:
    """Return the shares of the mistakes in one sentence, without those of nothing. found: of `AnswerScores`."""
    mistakes = (
        (1 - found["recall@0.5"], "of the true objects are missed"),
        (found["duplicate_rate"], "of the answered ones are duplicates"),
        (1 - found["desc_exact"], "of those in place have another description"),
        (1 - found["parse_rate"], "of the answers are broken"),
    )
    return f"mistakes: {', '.join(f'{rate:.0%} {what}' for rate, what in mistakes if not math.isnan(rate))}"


def advice(found: Mapping[str, Any], order: ObjectOrder) -> Iterator[str]:
    """Yield what to do, the first thing first. order: of the objects in the records."""
    if found["objects_per_truth"] > MOST_OBJECTS:
        yield (
            f"the answers run away, with {found['objects_per_truth']:.1f} objects for each true one: take an earlier"
            " checkpoint, and train on with a lower training.learning_rate, supervised_share above 0, or recipe:"
            " recommended; a model that has always answered so needs stage 1 with this prompt"
        )
        return
    if found["parse_rate"] < 1 - MOST_BROKEN:
        yield (
            "continue stage 1, or raise max_new_tokens if the answers are only long: stage 2 and GRPO need a model"
            f" that breaks at most {MOST_BROKEN:.0%} of its answers"
        )
        return
    if math.isnan(found["recall@0.5"]):
        yield "add records with objects: where nothing is true, the figures can only count what is wrong"
        return
    gain = found[WITHOUT_DUPLICATES]["f1@0.5"] - found["f1@0.5"]
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
            "continue stage 1 while it improves; with annotations in an order, stage 2 has been ahead of it where"
            " images were few, not where they were many (docs/results.md)"
        )
