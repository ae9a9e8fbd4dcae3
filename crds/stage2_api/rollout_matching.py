"""`custom.extra.rollout_matching`: rollouts, matching, targets and buffer of stage-2 training.

Source: semantics sections 3 (keys, defaults, rules), 4 (rollouts and matching), 6 (loss), 7-8 (packing), 9 (buffer),
10 (offload), 17 (choices beyond the first implementation). Senseless values (`candidate_top_k: 0`, `ot_epsilon: -1`),
which the first implementation changed silently, are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stage2_api.section import Count, Fraction, Positive, Scale, Section, Weight, free_mapping
from stage2_api.vllm import Vllm

Overlong = Literal["error", "cut", "skip"]
Assignment = Literal["hungarian", "dynamic"]
MaskIouMode = Literal["canvas", "analytic", "supersample"]
OtCost = Literal["l1", "l2"]
OtEpsilonMode = Literal["bins", "relative"]
OtBboxTarget = Literal["barycentric", "aabb"]
LossNormalizer = Literal["micro", "window"]
UnmatchedObjects = Literal["neutral", "dropped", "penalised"]


class RepeatTerminate(Section):
    """Ends an answer that repeats itself. The answer counts as truncated.

    vLLM has one check: a sequence of up to `ngram_size` tokens that repeats until it fills `ngram_repeats` times
    `ngram_size` tokens at the end of an answer. It also catches a single repeated token, and ignores `min_new_tokens`
    and `max_object_keys`. Servers of `swift rollout` have no check.
    """

    enabled: bool = False
    """Whether to end answers that repeat themselves."""
    min_new_tokens: Count = 256
    """New tokens before the first check of an answer (hf backend)."""
    max_consecutive_token_repeats: Count = 64
    """Times that one token may repeat in a row (hf backend); 0 turns this check off."""
    ngram_size: Positive = 64
    """Length in tokens of a repeated sequence that ends an answer."""
    ngram_repeats: Annotated[int, Field(ge=2, le=1024)] = 2
    """Repeats of the sequence that end an answer."""
    max_object_keys: Positive | None = None
    """Objects after which an answer ends (hf backend); null means no limit."""


class RolloutBuffer(Section):
    """Reuses one window of rollouts for several optimizer steps."""

    enabled: bool = False
    """Whether to reuse rollouts; no effect while `m_steps` is 1."""
    m_steps: Positive = 1
    """Optimizer steps per window of rollouts: the first makes them (E-step), the others reuse them."""


class Pipeline(Section):
    """Makes the next optimizer step's rollouts while the current step trains, with weights one step old."""

    enabled: bool = False
    """Whether to generate rollouts one step ahead, with the weights from before the current optimizer step. No rollout
    is older than one sync, and `rollouts.jsonl` records its version."""


class Runaway(Section):
    """Ends a run whose answers run away: they list ever more false objects until the token limit truncates them."""

    enabled: bool = True
    """Whether to end such a run, after a checkpoint and with exit code 64."""
    objects_per_truth: Scale = 3.0
    """Maximum ratio of objects in answers, including dropped ones, to true objects."""
    truncated_share: Fraction = 0.3
    """Maximum share of answers that end inside the JSON."""
    steps: Positive = 20
    """Optimizer steps with fresh rollouts over which both are averaged. No run ends before that many steps."""


class OffloadSettings(Section):
    """Moves the training state to main memory while a colocated engine makes rollouts. Ignored in other modes."""

    enabled: bool = False
    """Whether to move training state; no effect if neither part is chosen."""
    offload_model: bool = False
    """Whether to move the model's parameters."""
    offload_optimizer: bool = False
    """Whether to move the optimizer's state."""


IgnoredMapping = Annotated[dict[str, Any] | None, Field(json_schema_extra={"x-stage2-schema": free_mapping(64)})]


RECOMMENDED: dict[str, Any] = {
    "assignment": "dynamic",
    "unmatched_objects": "dropped",
    "matched_text_weight": 1.0,
    "missed_desc_weight": 1.0,
    "soft_ce_weight": 0.1,
    "w1_weight": 0.1,
}
"""Defaults of `recipe: recommended` where they differ from the specification's; docs/results.md shows why."""


class RolloutMatching(Section):
    """Everything that stage-2 training adds to ordinary fine-tuning."""

    recipe: Literal["seeds", "recommended"] = "seeds"
    """Defaults of the keys that decide what a rollout teaches: `seeds` is the original specification, whose answers can
    run away; `recommended` is the set that was ahead of continued stage 1. A key that is set, here or in
    `custom.coord_soft_ce_w1`, wins."""
    rollout_backend: Literal["vllm", "hf"] = "vllm"
    """Backend of the rollouts: `vllm`, or `hf` for the learner's own model through transformers. vLLM never falls back
    to `hf`."""
    rollout_generate_batch_size: Positive = 1
    """Rollouts that the hf backend generates at once in each learner process. A colocated vLLM uses
    `vllm.infer_batch_size` instead."""
    post_rollout_pack_scope: Literal["micro", "window", "step"] = "micro"
    """Scope of packing: `micro` packs one row per micro-step and carries leftovers over; `window` plans the rows of an
    accumulation window together, one per micro-step; `step` packs the answers of an optimizer step into as few rows as
    possible, trains on each full row at once, and averages the loss over all tokens of the step, so that the gradient
    is that of the unpacked batch."""
    post_rollout_overlong: Overlong | None = None
    """Treatment of an answer whose segment is longer than a packed row: `error` ends the run after a checkpoint; `cut`
    removes whole objects from the end of the answer, or skips the sample if its true objects alone are too long; `skip`
    skips the sample. Null means `cut` with `post_rollout_pack_scope: step`, and otherwise counts the sample against
    `training.max_bad_samples`."""
    decode_mode: Literal["greedy", "beam"] = "greedy"
    """Decoding of rollouts: `greedy`, which samples if `temperature` is above 0, or `beam` (hf backend only)."""
    max_new_tokens: Positive = 512
    """Maximum number of tokens of one rollout. Prompt and answer together must fit `vllm.max_model_len`; dense images
    need thousands."""
    num_beams: Annotated[int, Field(ge=1, le=1024)] = 1
    """Beams of the hf backend's beam search. Only the best beam trains."""
    num_return_sequences: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Beams that beam search returns; null means all of them."""
    temperature: Weight = 0.0
    """Sampling temperature; 0 means greedy decoding. top_p is always 1, and top_k always off."""
    repetition_penalty: Scale = 1.0
    """Penalty on tokens that an answer already contains; 1 means none. 1.05 helps with long lists of objects."""
    repeat_terminate: RepeatTerminate = RepeatTerminate()
    """Early end of repetitive answers."""
    assignment: Assignment = "hungarian"
    """Assignment of predicted to true objects: `hungarian` matches finished shapes at the least total cost; `dynamic`
    also lets each box without a match follow the true box nearest to its coordinates so far."""
    candidate_top_k: Positive = 10
    """Number of ground-truth objects to compare each predicted object with: those whose boxes overlap most."""
    maskiou_gate: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Minimum mask IoU of a match."""
    maskiou_resolution: Annotated[int, Field(ge=1, le=8192)] = 256
    """Side of the canvas for mask comparison, in pixels. At 256, boxes below about 4 bins are unreliable."""
    maskiou_mode: MaskIouMode = "canvas"
    """Comparison of masks: `canvas` draws every object on one canvas over the whole image; `analytic` computes pairs of
    boxes exactly and draws the rest; `supersample` also stretches the canvas over each drawn pair, so that no object is
    too small."""
    fp_cost: Weight = 1.0
    """Cost of leaving a predicted object unmatched; a match costs 1 - IoU."""
    fn_cost: Weight = 1.0
    """Cost of leaving a ground-truth object unmatched. A pair is matched only while 1 - IoU < fp_cost + fn_cost."""
    ot_cost: OtCost = "l2"
    """Distance between points in the optimal transport of polygons: `l1`, or `l2` (not squared)."""
    ot_epsilon: Scale = 10.0
    """Entropic regularisation of the optimal transport, in the unit of `ot_epsilon_mode`. Large values shrink small
    polygons."""
    ot_epsilon_mode: OtEpsilonMode = "bins"
    """Unit of `ot_epsilon`: `bins`, or `relative` for thousandths of the true object's diagonal, so that small polygons
    do not learn to shrink."""
    ot_iters: Positive = 30
    """Sinkhorn iterations of the optimal transport."""
    ot_bbox_target: OtBboxTarget = "barycentric"
    """Target of a predicted box that matches a polygon: `barycentric` means the box of its transported corners, `aabb`
    the polygon's bounding box."""
    runaway: Runaway = Runaway()
    """Early end of a run whose answers run away."""
    supervised_share: Fraction = 0.0
    """Share of optimizer steps that train on the ground truth as stage 1 does, without rollouts. They are spread
    evenly, from an offset that the seed sets."""
    matched_text_weight: Weight = 0.0
    """Weight of the cross entropy on structure and descriptions of matched objects in the answer itself; a wrong
    description is taught the true one if both have the same number of tokens."""
    missed_desc_weight: Weight = 0.0
    """Weight of the cross entropy on descriptions of missed objects; 0 trains only their structure and coordinates."""
    duplicate_iou: Annotated[float, Field(gt=0, le=1)] | None = None
    """IoU of bounding boxes from which an object counts as a duplicate of an earlier one with the same description, and
    is removed before matching; null keeps all."""
    unmatched_objects: UnmatchedObjects = "neutral"
    """Treatment of unmatched objects in an answer: `neutral` keeps them without a loss, `dropped` removes them,
    `penalised` keeps them and penalises the token that started each."""
    unmatched_weight: Scale = 0.1
    """Weight of the penalty -log(1 - p) with `unmatched_objects: penalised`; p is the token's probability."""
    target_sigma: Scale = 2.0
    """Standard deviation of the soft coordinate target, in bins."""
    target_truncate: Count | None = None
    """Radius in bins beyond which the soft coordinate target is zero; null means no limit."""
    temperature_coord: Scale = 1.0
    """Softmax temperature of the coordinate losses."""
    soft_ce_weight: Weight = 1.0
    """Weight of the soft cross-entropy over the 1000 coordinate tokens."""
    w1_weight: Weight = 1.0
    """Weight of the Wasserstein-1 distance between predicted and soft target coordinates."""
    gate_weight: Weight = 1.0
    """Weight of the loss on probability outside the coordinate tokens at a coordinate's position."""
    loss_normalizer: LossNormalizer = "micro"
    """Denominator of the mean loss: `micro` counts the supervised tokens of each micro-step; `window` those of the
    whole accumulation window in all learner processes, so that the loss does not depend on how samples are divided.
    `post_rollout_pack_scope: step` has its own mean."""
    rollout_buffer: RolloutBuffer = RolloutBuffer()
    """Reuse of one window of rollouts for several optimizer steps."""
    pipeline: Pipeline = Pipeline()
    """Rollouts of the next step while the current one trains (server mode)."""
    image_cache_gib: Weight = 4.0
    """Main memory for processed images in each learner process, in GiB. Images that do not fit are processed again for
    training; a megapixel image takes 0.025."""
    offload: OffloadSettings = OffloadSettings()
    """Offloading of training state to main memory during colocated rollouts."""
    vllm: Vllm = Vllm()
    """Settings of vLLM: where it runs, with what, and how weights reach it."""
    debug_dump_parse_failures: bool = False
    """Whether the original stack logs rollouts that do not parse. Ignored: `rollouts.jsonl` has every rollout."""
    debug_dump_max: Count = 3
    """Maximum number of such rollouts. Ignored."""
    monitor_dump: IgnoredMapping = Field(None, max_length=64)
    """Mapping of the original stack's dumps of samples. Ignored: `rollouts.jsonl` has every sample, and `stage2 report`
    shows them."""
    desc_monitor: IgnoredMapping = Field(None, max_length=64)
    """Mapping of the original stack's figures of descriptions. Ignored: evaluations compare descriptions."""

    @property
    def overlong(self) -> Overlong | None:
        """Treatment of an answer that is too long for a row; None: it is a bad sample."""
        return self.post_rollout_overlong or ("cut" if self.post_rollout_pack_scope == "step" else None)

    @property
    def uses_servers(self) -> bool:
        """Whether rollouts come from rollout servers: from vLLM in server mode."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "server"

    @property
    def colocates(self) -> bool:
        """Whether rollouts come from a vLLM inside the learner's processes."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "colocate"
