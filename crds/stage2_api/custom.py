"""`custom`: data, prompt and trainer variant.

Source: semantics sections 2 and 3; key names as CoordExp has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.grpo import Grpo, RolloutServer
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.section import Count, Path, Positive, Scale, Section, Text, Weight


class CoordTokens(Section):
    """Coordinates as tokens of their own."""

    enabled: Literal[True] = True
    """Whether coordinates are the tokens `<|coord_0|>` to `<|coord_999|>`; stage-2 training needs them."""
    skip_bbox_norm: bool | None = None
    """Whether plain numbers in records already are bins from 0 to 999. False: they are pixels, and width and height
    turn them into bins. Null: each record says what its numbers are (`units`), and one that does not is refused."""


class CoordSoftCeW1(Section):
    """Stage-1 settings of the coordinate loss. A key that is set here and not under `rollout_matching` counts there."""

    enabled: bool = True
    """Whether stage-1 training uses this loss; without it coordinates have the cross entropy of any other token. Stage
    2 always uses it."""
    soft_ce_weight: Weight | None = None
    """Weight of the soft cross-entropy; null means that of `rollout_matching`."""
    w1_weight: Weight | None = None
    """Weight of the Wasserstein-1 distance; null means that of `rollout_matching`."""
    gate_weight: Weight | None = None
    """Weight of the loss on probability outside the coordinate tokens; null means that of `rollout_matching`."""
    temperature: Scale | None = None
    """Softmax temperature; null means `rollout_matching.temperature_coord`."""
    target_sigma: Scale | None = None
    """Standard deviation of the soft target in bins; null means that of `rollout_matching`."""
    target_truncate: Count | None = None
    """Radius in bins beyond which the soft target is zero; null means that of `rollout_matching`."""


class CustomExtra(Section):
    """Settings of the trainer variant."""

    rollout_matching: RolloutMatching = RolloutMatching()
    """Rollouts, matching, targets, buffer and monitors of stage-2 training."""
    rollout_server: RolloutServer | None = None
    """Rollout server of a GRPO run: how vLLM is started."""


class Custom(Section):
    """Data, prompt and trainer variant."""

    trainer_variant: Literal["rollout_matching_sft", "sft", "grpo"] = "rollout_matching_sft"
    """Trainer that runs: rollout-matching fine-tuning (stage 2), supervised fine-tuning on the ground truth (stage 1,
    `sft`), or GRPO, which `rlhf` describes. `sft` makes rollouts for evaluation only, and without one none."""
    train_jsonl: Path
    """File of training records, one JSON object a line; images are relative to its folder."""
    val_jsonl: Path | None = None
    """File of evaluation records; null means no evaluation."""
    train_sample_limit: Positive | None = None
    """Most training records that are read, from the start of the file; null means all."""
    val_sample_limit: Positive | None = None
    """Most evaluation records that are read, from the start of the file; null means all."""
    user_prompt: Annotated[Text, Field(min_length=1)] = (
        "Detect every object in the image. Answer with one line of JSON: "
        '{"object_1": {"desc": "...", "bbox_2d": [x1, y1, x2, y2]}, ...}'
    )
    """Text part of the user's turn, after the images. It must be the prompt on which the stage-1 model was trained."""
    json_format: Literal["standard"] = "standard"
    """Form of the answer: one line of JSON."""
    object_ordering: Literal["sorted", "shuffled"] = "sorted"
    """Order of objects in what is taught: `sorted` is that of the record, `shuffled` (stage 1 only) another one each
    time that the record is trained on, drawn from the run's seed."""
    emit_norm: Literal["none"] = "none"
    """Normalisation of coordinates in answers; coordinate tokens need none."""
    coord_tokens: CoordTokens = CoordTokens()
    """Coordinates as tokens of their own."""
    coord_soft_ce_w1: CoordSoftCeW1 = CoordSoftCeW1()
    """Stage-1 settings of the coordinate loss, used where `rollout_matching` sets none."""
    use_summary: bool = False
    """Whether records are images with a summary (`metadata.summary_ref`) rather than with objects; GRPO only."""
    assistant_prefix_format: Text | None = None
    """Header line of a summary, with `{domain}` and `{task}`, such as `<DOMAIN={domain}>, <TASK={task}>`."""
    grpo: Grpo = Grpo()
    """What GRPO trains on, beside `rlhf`."""
    extra: CustomExtra = CustomExtra()
    """Settings of the trainer variant."""

    @property
    def rollout_matching(self) -> RolloutMatching:
        """`extra.rollout_matching` with the coordinate loss of `coord_soft_ce_w1` where it sets none itself."""
        own, stage1 = self.extra.rollout_matching, self.coord_soft_ce_w1
        inherited = {
            "temperature_coord" if name == "temperature" else name: value
            for name in stage1.model_fields_set - {"enabled"}
            if (value := getattr(stage1, name)) is not None
        }
        return own.model_copy(
            update={name: value for name, value in inherited.items() if name not in own.model_fields_set}
        )
