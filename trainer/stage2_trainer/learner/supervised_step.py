"""Stage 1: the step's segments are the ground truth itself, and nothing is generated for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from stage2_api.pod.report import ReportedSync
from stage2_trainer.data.encode import Prompt
from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.matching import GroundTruth, supervised_target
from stage2_trainer.rollouts.rollout_source import GenerationRequest, PendingRollouts, RolloutBatch
from stage2_trainer.wire.requests import Rollout

NONE = "none"  # the sync mode where nothing generates


class NoRollouts:
    """A source that answers each request with nothing, at once. seed: the run's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.sync_state = ReportedSync(requested_mode=NONE, effective_mode=NONE)

    def begin(self, request: GenerationRequest) -> PendingRollouts:
        """Return an empty answer for each chat; no image is read."""
        return PendingRollouts.made(self.generate(request))

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Return the same, all at once."""
        nothing = Rollout([], [], "", server="", version=request.global_step, finish_reason="stop")
        return RolloutBatch([nothing] * len(request.chats), None, request.seeds(self._seed))


class SupervisedEStep(EStep):
    """A step whose segments have the prompt as the learner encodes it, and the record's whole ground truth.

    shuffled_by: seed of an order of objects for each record and step; None = that of the record.
    """

    def __init__(self, *, shuffled_by: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._shuffled_by = shuffled_by

    def _match(self, record: Record, prompt: Prompt, rollout: Rollout) -> Matched:
        shown = replace(rollout, prompt_token_ids=prompt.input_ids.tolist())
        truth = self._ordered(record, rollout.version)
        return Matched(record, shown, supervised_target(truth, self._matcher.vocab), from_truth=True)

    def _ordered(self, record: Record, step: int) -> GroundTruth:
        if self._shuffled_by is None:
            return record.ground_truth
        objects = list(record.ground_truth.objects)
        random.Random(f"{self._shuffled_by} {step} {record.sample_id}").shuffle(objects)
        return replace(record.ground_truth, objects=tuple(objects))
