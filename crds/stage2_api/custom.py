"""`custom`: data, prompt and trainer variant.

Source: semantics sections 2 and 3; key names as CoordExp has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.grpo import Grpo, RolloutServer
from stage2_api.rollout_matching import RECOMMENDED, RolloutMatching
from stage2_api.section import Count, Path, Positive, Scale, Section, Text, Weight


class CoordTokens(Section):
    """Coordinate tokens."""

    enabled: Literal[True] = True
    """Whether coordinates are the tokens `<|coord_0|>` to `<|coord_999|>`; stage-2 training needs them."""
    skip_bbox_norm: bool | None = None
    """Whether plain numbers in records are bins from 0 to 999 (true) or pixels (false). Null: each record states its
    `units`, and a record without them is refused."""


class CoordSoftCeW1(Section):
    """Coordinate loss of stage 1. A key that is set only here applies to `rollout_matching` too."""

    enabled: bool = True
    """Whether stage 1 uses this loss rather than plain cross entropy for coordinates. Stage 2 always uses it."""
    soft_ce_weight: Weight | None = None
    """Weight of the soft cross-entropy; null means the value of `rollout_matching`."""
    w1_weight: Weight | None = None
    """Weight of the Wasserstein-1 distance; null means the value of `rollout_matching`."""
    gate_weight: Weight | None = None
    """Weight of the loss on probability outside the coordinate tokens; null means the value of `rollout_matching`."""
    temperature: Scale | None = None
    """Softmax temperature; null means `rollout_matching.temperature_coord`."""
    target_sigma: Scale | None = None
    """Standard deviation of the soft target in bins; null means the value of `rollout_matching`."""
    target_truncate: Count | None = None
    """Radius in bins beyond which the soft target is zero; null means the value of `rollout_matching`."""


class CustomExtra(Section):
    """Settings of the trainer variant."""

    rollout_matching: RolloutMatching = RolloutMatching()
    """Rollouts, matching, targets and buffer of stage-2 training."""
    rollout_server: RolloutServer | None = None
    """Rollout server of a GRPO run: arguments of vLLM."""


class Custom(Section):
    """Data, prompt and trainer variant."""

    trainer_variant: Literal["rollout_matching_sft", "sft", "grpo"] = "rollout_matching_sft"
    """Trainer: rollout-matching fine-tuning (stage 2), supervised fine-tuning on the ground truth (`sft`, stage 1), or
    GRPO, which `rlhf` configures. `sft` generates rollouts only to evaluate."""
    train_jsonl: Path
    """File of training records, one JSON object per line; image paths are relative to its folder, and stay below it."""
    val_jsonl: Path | None = None
    """File of evaluation records; null means no evaluation."""
    image_roots: list[Path] = Field(default=[], max_length=64)
    """List of further folders in which the images of records may be."""
    train_sample_limit: Positive | None = None
    """Number of training records to read, from the start of the file; null means all."""
    val_sample_limit: Positive | None = None
    """Number of evaluation records to read, from the start of the file; null means all."""
    user_prompt: Annotated[Text, Field(min_length=1)] = (
        "Detect every object in the image. Answer with one line of JSON: "
        '{"object_1": {"desc": "...", "bbox_2d": [x1, y1, x2, y2]}, ...}'
    )
    """Text of the user message, after the images. It must be the prompt that the stage-1 model was trained with."""
    json_format: Literal["standard"] = "standard"
    """Format of the answer: one line of JSON."""
    object_ordering: Literal["sorted", "shuffled"] = "sorted"
    """Order of the objects in the target: `sorted` keeps the record's order; `shuffled` (stage 1 only) draws a new
    order from the run's seed each time."""
    emit_norm: Literal["none"] = "none"
    """Normalisation of coordinates in answers; coordinate tokens need none."""
    coord_tokens: CoordTokens = CoordTokens()
    """Coordinate tokens."""
    coord_soft_ce_w1: CoordSoftCeW1 = CoordSoftCeW1()
    """Coordinate loss of stage 1, and of stage 2 where `rollout_matching` sets none."""
    use_summary: bool = False
    """Whether records have a summary (`metadata.summary_ref`) instead of objects; GRPO only."""
    assistant_prefix_format: Text | None = None
    """Header line of a summary, with `{domain}` and `{task}`, such as `<DOMAIN={domain}>, <TASK={task}>`."""
    grpo: Grpo = Grpo()
    """Data and batches of GRPO, in addition to `rlhf`."""
    extra: CustomExtra = CustomExtra()
    """Settings of the trainer variant."""

    @property
    def rollout_matching(self) -> RolloutMatching:
        """`extra.rollout_matching` with its recipe, and with coordinate-loss keys that only `coord_soft_ce_w1` sets."""
        own, stage1 = self.extra.rollout_matching, self.coord_soft_ce_w1
        inherited = {
            "temperature_coord" if name == "temperature" else name: value
            for name in stage1.model_fields_set - {"enabled"}
            if (value := getattr(stage1, name)) is not None
        }
        values = (RECOMMENDED if own.recipe == "recommended" else {}) | inherited
        return own.model_copy(update={key: values[key] for key in values.keys() - own.model_fields_set})
