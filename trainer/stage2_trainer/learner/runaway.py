"""The end of a run whose answers run away: more and more objects that are not there, until the token limit cuts them.

Objects that match nothing cost nothing by default while each may reduce what is missed, so a share of runs grows so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stage2_api.errors import Problem
from stage2_api.rollout_matching import Runaway
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.rollouts.errors import RunawayError

KEY = "custom.extra.rollout_matching.runaway"
_WAY_OUT = (
    "look at the last rollouts; go on with supervised_share above 0, unmatched_objects dropped or penalised, or a"
    " repetition_penalty of 1.05, in another training.output_dir or with training.resume: allow-changes; or raise it."
    " The checkpoint of this step is saved"
)


@dataclass(frozen=True)
class _Counts:
    """Counts of the fresh rollouts of one optimizer step, or of several."""

    answers: int
    truncated: int
    objects: int
    truth: int


class RunawayWatch:
    """A count of objects and cut answers over the last optimizer steps with fresh rollouts."""

    def __init__(self, rule: Runaway) -> None:
        self._rule = rule
        self._counts: deque[_Counts] = deque(maxlen=rule.steps)

    def note(self, samples: Sequence[SampleStats], *, step: int) -> None:
        """Count the samples of a step that made rollouts; others count for nothing. All processes note the same.

        Raises:
            RunawayError: over as many steps as the rule says there are more objects, or more cut answers, than it
                allows.
        """
        rolled_out = [one for one in samples if not one.bad and not one.from_truth]
        if not self._rule.enabled or not rolled_out:
            return
        self._counts.append(
            _Counts(
                len(rolled_out),
                sum(one.truncated for one in rolled_out),
                sum(one.valid_objects + one.dropped_invalid + one.dropped_ambiguous for one in rolled_out),
                sum(one.gt_objects for one in rolled_out),
            )
        )
        if len(self._counts) == self._rule.steps and (problems := self._problems(step)):
            raise RunawayError(problems)

    def _problems(self, step: int) -> list[Problem]:
        answers, truncated, objects, truth = (
            sum(getattr(one, name) for one in self._counts) for name in ("answers", "truncated", "objects", "truth")
        )
        per_truth, share = objects / max(truth, 1), truncated / answers
        over = f"over the last {self._rule.steps} optimizer steps with rollouts, up to step {step}, {answers} answers"
        found = {
            "objects_per_truth": (
                per_truth,
                f"{over} have {objects} objects for {truth} true ones, {per_truth:.2f} each",
            ),
            "truncated_share": (share, f"of {over} {truncated} end within the JSON, a share of {share:.2f}"),
        }
        return [
            Problem(f"{KEY}.{name}", getattr(self._rule, name), f"answers run away: {text}; this is the most", _WAY_OUT)
            for name, (value, text) in found.items()
            if value > getattr(self._rule, name)
        ]
