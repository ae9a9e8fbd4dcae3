"""Where rollouts come from, as the E-step and the evaluation see it."""

from __future__ import annotations

from typing import Protocol

from stage2_api.pod.progress import ReportedSync
from stage2_trainer.rollouts.generation_request import GenerationRequest
from stage2_trainer.rollouts.synced_rollouts import RolloutBatch


class RolloutSource(Protocol):
    """Makes rollouts with the weights as they are now."""

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        ...

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Return one rollout for each chat, all made by the weights of the request's step.

        With several learner processes all of them must call it equally often, with or without chats of their own.
        """
        ...
