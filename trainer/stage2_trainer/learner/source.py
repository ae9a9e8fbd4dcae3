"""Where rollouts come from, as the E-step and the evaluation see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from stage2_trainer.learner.metrics import Stopwatch
from stage2_trainer.learner.progress import Sync
from stage2_trainer.learner.rollouts import FreshBatch
from stage2_trainer.rollout.backend import OnRollout


class RolloutSource(Protocol):
    """Makes rollouts with the weights as they are now."""

    @property
    def sync_state(self) -> Sync:
        """The last sync."""
        ...

    def generate(
        self,
        model: nn.Module,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        *,
        global_step: int,
        micro_step: int,
        stopwatch: Stopwatch,
        on_rollout: OnRollout | None = None,
    ) -> FreshBatch:
        """Return one rollout for each chat, all made by the weights of `global_step`.

        A source that gets them one by one tells `on_rollout` of each at once; the others need not.

        With several learner processes all of them must call it equally often, with or without chats of their own.
        """
        ...
