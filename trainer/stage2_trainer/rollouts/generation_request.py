"""What rollouts are asked for: the prompts of one micro-step, and the weights that shall answer them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.wire.rollout import OnRollout

Chats = Sequence[Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class GenerationRequest:
    """One rollout for each of `chats`, by `model` as it is at `global_step`.

    micro_step: its place in the optimizer step; no other request of that step has it. stopwatch: gets the seconds that
    it takes. on_rollout: is told of each rollout at once by sources that get them one by one; the others need not.
    """

    model: nn.Module
    chats: Chats
    global_step: int
    micro_step: int
    stopwatch: Stopwatch
    on_rollout: OnRollout | None = None
