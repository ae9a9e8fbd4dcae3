"""The watch that ends a run whose answers run away (semantics, section 20)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from stage2_api.errors import Problem
from stage2_api.rollout_matching import Runaway
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.rollouts.errors import RunawayError

KEY = "custom.extra.rollout_matching.runaway"
_WAY_OUT = (
    "look at the last rollouts; go on with a lower training.learning_rate, supervised_share above 0 or, if it is not"
    " set, recipe: recommended, in another training.output_dir or with training.resume: allow-changes; or raise the"
    " limit. The checkpoint of this step is saved"
)
_STAGE_1_FIRST = (
    "answers were hardly better in the first steps, so the model has not learnt to answer this prompt: train stage 1"
    " first (custom.trainer_variant: sft), with the same prompt, or raise max_new_tokens if true answers are as long"
)
_GREW = 1.5
"""A run went astray by training if its figure is so many times that of its first steps."""


class RunawayWatch:
    """Ends a run whose answers run away: more and more objects that are not there, until the token limit cuts them.

    By default unmatched objects cost nothing while each may reduce the misses, so a share of runs grows so.
    """

    def __init__(self, rule: Runaway) -> None:
        self._rule = rule
        self._counts: deque[tuple[int, int, int, int]] = deque(maxlen=rule.steps)  # answers, truncated, objects, truth
        self._resumed: bool | None = None  # None before the first rollouts
        self._first: Mapping[str, float] = {}  # the figures of the first steps

    def note(self, samples: Sequence[SampleStats], *, step: int) -> None:
        """Count the samples of a step with fresh rollouts. All processes note the same.

        Raises:
            RunawayError: over as many steps as the rule says there are more objects, or more cut answers, than it
                allows.
        """
        rolled_out = [one for one in samples if not one.bad and not one.from_truth]
        if not self._rule.enabled or not rolled_out:
            return
        if self._resumed is None:
            self._resumed = step > self._rule.steps  # nobody here knows how such a run began
        self._counts.append(
            (
                len(rolled_out),
                sum(one.truncated for one in rolled_out),
                sum(one.valid_objects + one.dropped_invalid for one in rolled_out),
                sum(one.gt_objects for one in rolled_out),
            )
        )
        if len(self._counts) < self._rule.steps:
            return
        if problems := self._problems(step):
            raise RunawayError(problems)

    def _problems(self, step: int) -> list[Problem]:
        answers, truncated, objects, truth = map(sum, zip(*self._counts, strict=True))
        figures = {"objects_per_truth": objects / max(truth, 1), "truncated_share": truncated / answers}
        self._first = self._first or figures
        since = " since the resume" if self._resumed else ""
        compared = {
            name: f"{value:.2f}{what} ({self._first[name]:.2f} in the first ones{since})"
            for (name, value), what in zip(figures.items(), (" each", ""), strict=True)
        }
        over = f"in the last {self._rule.steps} optimizer steps with rollouts, up to step {step},"
        texts = {
            "objects_per_truth": f"{answers} answers have {objects} objects for {truth} true ones"
            + (f", {compared['objects_per_truth']}" if truth else ""),
            "truncated_share": f"{truncated} of {answers} answers end within the JSON, a share of"
            f" {compared['truncated_share']}",
        }
        return [
            Problem(
                f"{KEY}.{name}",
                getattr(self._rule, name),
                f"answers run away: {over} {texts[name]}",
                _WAY_OUT if self._resumed or value > _GREW * self._first[name] else _STAGE_1_FIRST,
            )
            for name, value in figures.items()
            if value > getattr(self._rule, name)
        ]
