"""Sections of the training YAML around rollout matching: `model`, `template`, `tuner` and `custom`.

Source: semantics sections 2 and 3; key names as ms-swift and CoordExp have them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.grpo import Grpo, RolloutServer
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.section import Count, Name, Path, Positive, Scale, Section, Text, Weight


class Model(Section):
    """The model that is trained."""

    model: Path
    """Folder of the checkpoint, or its name on a hub, with the 1000 coordinate tokens already in its vocabulary."""
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format in which weights are loaded; `auto` takes the checkpoint's own."""
    attn_impl: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention kernel of the learner. `sdpa` comes with PyTorch and runs everywhere; the flash kernels need a package
    and a GPU."""


class Template(Section):
    """How records become prompts."""

    template: Literal["qwen3_vl"] = "qwen3_vl"
    """Name of the chat template; the checkpoint's own is used."""
    system: Text | None = None
    """System turn of every prompt; null means none."""
    max_length: Positive | None = None
    """Longest sequence in tokens; also the length of packed rows unless `global_max_length` is set."""
    truncation_strategy: Literal["raise", "left", "right", "delete"] = "raise"
    """What happens to a prompt that is too long. Stage-2 training always refuses it, whatever stands here: a cut prompt
    would no longer be the one that was rolled out."""
    max_pixels: Positive | None = None
    """Most pixels of an image; larger ones are scaled down, on the servers as in the learner. Unset takes the
    checkpoint's own limit."""
    min_pixels: Positive | None = None
    """Fewest pixels of an image; smaller ones are scaled up. Unset takes the checkpoint's own limit."""


class Tuner(Section):
    """Which weights are trained, and in what form."""

    train_type: Literal["full", "lora"] = "lora"
    """Form of training: `full` changes weights themselves, `lora` trains low-rank adapters beside them."""
    use_dora: bool = False
    """Whether adapters also learn a magnitude for each output row (DoRA). vLLM cannot load such adapters, so they
    travel merged."""
    use_swift_lora: Literal[False] = False
    """Adapter implementation of ms-swift; PEFT is used always."""
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the adapters."""
    lora_alpha: Positive = 32
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the adapters' inputs dropped in training."""
    lora_bias: Literal["none"] = "none"
    """Bias terms trained beside the adapters: none."""
    target_modules: list[Name] = Field(default=["all-linear"], min_length=1, max_length=256)
    """List of modules that get adapters, by the end of their names; `all-linear` means all linear layers that are not
    frozen."""
    target_regex: Text | None = None
    """Regular expression that a module's whole name must match to get an adapter; null leaves the choice to
    `target_modules`."""
    modules_to_save: list[Name] = Field(default=[], max_length=256)
    """List of modules that are trained whole beside the adapters, by the end of their names."""
    freeze_llm: bool = False
    """Whether the language model is left as it is."""
    freeze_vit: bool = True
    """Whether the image encoder is left as it is."""
    freeze_aligner: bool = True
    """Whether the aligner (the mergers between image encoder and language model) is left as it is."""


class CoordTokens(Section):
    """Coordinates as tokens of their own."""

    enabled: Literal[True] = True
    """Whether coordinates are the tokens `<|coord_0|>` to `<|coord_999|>`; stage-2 training needs them."""
    skip_bbox_norm: bool = True
    """Whether plain numbers in records already are bins from 0 to 999. False: they are pixels, and width and height
    turn them into bins."""


class CoordSoftCeW1(Section):
    """Stage-1 settings of the coordinate loss. A key that is set here and not under `rollout_matching` counts there."""

    enabled: bool = False
    """Whether stage-1 training uses this loss; stage 2 always does."""
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

    trainer_variant: Literal["rollout_matching_sft", "grpo"] = "rollout_matching_sft"
    """Trainer that runs: rollout-matching fine-tuning, or GRPO, which `rlhf` describes."""
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
    object_ordering: Literal["sorted"] = "sorted"
    """Order in which objects that the rollout missed are appended: that of the record."""
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
