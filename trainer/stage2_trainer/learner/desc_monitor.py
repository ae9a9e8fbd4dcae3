"""How well descriptions of matched objects agree (`desc_monitor`): figures alone, without effect on the loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

from stage2_api.rollout_matching import DescMonitor
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.process.ranks import gathered, rank
from stage2_trainer.process.sentence_embedding import SentenceEmbedder
from stage2_trainer.scores.scored_image import normalised

logger = logging.getLogger(__name__)

Pair = tuple[str, str]


class DescriptionAgreement:
    """A listener of rollouts that keeps the descriptions of matched objects, and says how well they agree.

    every: optimizer steps from one comparison to the next.
    """

    def __init__(self, options: DescMonitor, *, every: int) -> None:
        self._options = options
        self._every = options.every_steps or every
        self._pairs: list[Pair] = []
        self._step = -1

    def __call__(self, step: int, matched: Sequence[Matched]) -> None:
        """Keep the pairs of a step's rollouts. step: the first is 0."""
        if not self._options.enabled:
            return
        if step != self._step:
            self._step, self._pairs = step, []
        for one in matched:
            said, true = one.target.parsed.valid_objects, one.target.ground_truth.objects
            self._pairs += [(said[pair.pred].desc, true[pair.gt].desc) for pair in one.target.matching.pairs]

    def figures(self, step: int) -> dict[str, float]:
        """Return the figures of the step that has ended, over all processes; none where it is not compared.

        step: the first is 1. All processes call it.
        """
        if not self._options.enabled or step % self._every:
            return {}
        own = self._pairs if self._step == step - 1 else []  # a step that reuses rollouts has none of its own
        pairs = [pair for share in gathered(own) for pair in share][: self._options.max_pairs]
        if not pairs or rank():
            return {}
        found = {"desc/pairs": float(len(pairs))}
        if self._options.mode != "semantic":
            found |= _exact(pairs)
        if self._options.mode != "exact" and (embedder := self._embedder) is not None:
            found |= self._semantic(pairs, embedder)
        return found

    def _semantic(self, pairs: Sequence[Pair], embedder: SentenceEmbedder) -> dict[str, float]:
        close = embedder.similarity([said for said, _ in pairs], [true for _, true in pairs])
        same = [value >= self._options.semantic_threshold for value in close]
        return {"desc/semantic_mean": sum(close) / len(close), "desc/semantic": sum(same) / len(same)}

    @cached_property
    def _embedder(self) -> SentenceEmbedder | None:
        """Return the model of sentence embeddings; None where it cannot be loaded, which is said once."""
        options = self._options
        try:
            return SentenceEmbedder.load(
                str(options.semantic_model),
                device=options.semantic_device,
                batch_size=options.semantic_batch_size,
                max_length=options.semantic_max_length,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            logger.warning("desc_monitor: %s cannot be loaded, and is left out: %s", options.semantic_model, error)
            return None


def _exact(pairs: Sequence[Pair]) -> Mapping[str, float]:
    exact = sum(said == true for said, true in pairs) / len(pairs)
    alike = sum(normalised(said) == normalised(true) for said, true in pairs) / len(pairs)
    return {"desc/exact": exact, "desc/normalised": alike}
