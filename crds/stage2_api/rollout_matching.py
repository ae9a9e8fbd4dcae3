"""`custom.extra.rollout_matching`: rollouts, matching, targets, buffer and monitors of stage-2 training.

Source: semantics sections 3 (keys, defaults, rules), 4 (rollouts and matching), 6 (loss), 7-8 (packing), 9 (buffer),
10 (offload), 17 (choices beyond the first implementation). Where that one changed a senseless value in silence
(`candidate_top_k: 0`, `ot_epsilon: -1`), it is refused here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from stage2_api.section import Count, Fraction, Name, Path, Positive, Scale, Section, Weight
from stage2_api.vllm import Vllm

RolloutBackend = Literal["vllm", "hf"]
PackScope = Literal["micro", "window", "step"]
Overlong = Literal["error", "cut", "skip"]
DecodeMode = Literal["greedy", "beam"]
MaskIouMode = Literal["canvas", "analytic", "supersample"]
OtCost = Literal["l1", "l2"]
OtEpsilonMode = Literal["bins", "relative"]
OtBboxTarget = Literal["barycentric", "aabb"]
LossNormalizer = Literal["micro", "window"]
MissedPlace = Literal["tail", "sorted", "shuffled"]
UnmatchedObjects = Literal["neutral", "dropped", "penalised"]


class RepeatTerminate(Section):
    """Ends an answer that repeats itself: it counts as cut.

    vLLM, on servers and in the learner's own processes, has one check: any sequence of up to `ngram_size` tokens that
    fills the end of an answer as `ngram_repeats` sequences of that size would. It ends a run of one token too, and
    knows neither `min_new_tokens` nor `max_object_keys`. Servers of `swift rollout` have no check.
    """

    enabled: bool = False
    """Whether answers that repeat themselves are ended."""
    min_new_tokens: Count = 256
    """New tokens before which an answer is not looked at (hf backend)."""
    max_consecutive_token_repeats: Count = 64
    """Times that one token may stand in a row (hf backend); 0 turns this check off."""
    ngram_size: Positive = 64
    """Tokens of the sequence whose repetition ends an answer."""
    ngram_repeats: Annotated[int, Field(ge=2, le=1024)] = 2
    """Times in a row that the sequence must stand to end an answer."""
    max_object_keys: Positive | None = None
    """Objects after which an answer is ended (hf backend); null means no limit."""


class RolloutBuffer(Section):
    """Reuses one window of rollouts for several optimizer steps."""

    enabled: bool = False
    """Whether rollouts are reused; without effect while `m_steps` is 1."""
    m_steps: Positive = 1
    """Optimizer steps for each window of rollouts: the first makes them (E-step), the others train on them again."""

    @property
    def reuses(self) -> bool:
        """Whether rollouts are trained on more than once."""
        return self.enabled and self.m_steps > 1


class Pipeline(Section):
    """Makes the next optimizer step's rollouts while the current one trains: stale by choice."""

    enabled: bool = False
    """Whether rollouts are made one step ahead, by servers that hold the weights before the current optimizer step:
    no rollout is older than one sync, and `rollouts.jsonl` says which version made it."""


class Runaway(Section):
    """Ends a run whose answers run away: ever more objects that are not there, until the limit of tokens cuts them."""

    enabled: bool = False
    """Whether such a run is ended, after a checkpoint and with exit code 64."""
    objects_per_truth: Scale = 3.0
    """Most objects of an answer, dropped ones included, for each true one."""
    truncated_share: Fraction = 0.3
    """Largest share of answers that end within the JSON."""
    steps: Positive = 20
    """Optimizer steps with fresh rollouts over which both are counted; before there are as many, nothing is ended."""


class Recovery(Section):
    """Looks for missed objects in further rollouts of a sample: what one of them finds can be found, and weighs more.

    Each further rollout costs a generation: with `rollouts: 4` a step generates four times as many answers. Nothing of
    them is trained on. An evaluation makes none.
    """

    rollouts: Annotated[int, Field(ge=1, le=64)] = 1
    """Rollouts of each sample, K: the one that is trained on, and K - 1 sampled ones; 1 makes no further one."""
    temperature: Scale = 0.7
    """Sampling temperature of the further ones."""
    weight: Scale = 2.0
    """Factor of the loss of a missed object that a further rollout found: of its coordinates, its structure, and its
    description where that is trained."""


class OffloadSettings(Section):
    """Moves the training state to main memory while a colocated engine makes rollouts. Ignored in other modes."""

    enabled: bool = False
    """Whether training state is moved; without effect if neither part is chosen."""
    offload_model: bool = False
    """Whether the model's parameters are moved."""
    offload_optimizer: bool = False
    """Whether the optimizer's state is moved."""


class MonitorDump(Section):
    """Writes some samples of some steps to files: prompt, rollout, matches and targets, for people to read."""

    enabled: bool = False
    """Whether samples are written."""
    only_world_process_zero: bool = True
    """Whether only the first learner process writes."""
    every_steps: Positive | None = None
    """Optimizer steps between two dumps; null means `training.logging_steps`."""
    dump_first_step: bool | None = None
    """Whether the first step is dumped too; null means `training.logging_first_step`."""
    max_events: Annotated[int, Field(le=2**31 - 1)] = 20
    """Most dumps of a run; a value of at most 0 means no limit."""
    max_samples: Positive = 1
    """Most samples in one dump."""
    max_text_chars: Positive = 4000
    """Characters after which a text is cut."""
    out_dir: Path | None = None
    """Folder for the files `step_000001.json` and so on; null means `<training.output_dir>/monitor_dumps`."""
    write_markdown: bool = True
    """Whether each dump is written as Markdown too."""


class DescMonitor(Section):
    """Measures how well descriptions of matched objects agree. Metrics only; no effect on the loss."""

    enabled: bool = False
    """Whether descriptions are compared."""
    mode: Literal["exact", "semantic", "both"] = "semantic"
    """How descriptions are compared: equal text, closeness of sentence embeddings, or both."""
    every_steps: Positive | None = None
    """Optimizer steps between two comparisons; null means `training.logging_steps`."""
    max_pairs: Positive = 64
    """Most pairs compared at one step."""
    semantic_model: Path = "sentence-transformers/all-MiniLM-L6-v2"
    """Name or folder of the sentence-embedding model. If it cannot be loaded, the comparison is skipped."""
    semantic_threshold: Annotated[float, Field(ge=-1, le=1)] = 0.6
    """Cosine similarity from which two descriptions count as equal."""
    semantic_device: Annotated[Name, StringConstraints(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "cpu"
    """Device of the sentence-embedding model: `cpu`, `cuda`, `cuda:1`, or `auto`. The default leaves the GPU alone."""
    semantic_batch_size: Positive = 64
    """Descriptions embedded at once."""
    semantic_max_length: Positive = 64
    """Tokens after which a description is cut for embedding."""


class RolloutMatching(Section):
    """Everything that stage-2 training adds to ordinary fine-tuning."""

    rollout_backend: RolloutBackend = "vllm"
    """What makes the rollouts: `vllm`, or `hf` for the learner's own model through transformers. Nothing falls back to
    `hf` by itself."""
    rollout_generate_batch_size: Positive = 1
    """Rollouts that the hf backend generates at once in each learner process. A colocated vLLM has
    `vllm.infer_batch_size` instead."""
    post_rollout_pack_scope: PackScope = "micro"
    """How far packing looks: `micro` packs one row for each micro-step and carries the rest over, `window` plans all
    rows of an accumulation window at once, one for each micro-step. `step` packs all answers of an optimizer step into
    as few rows as hold them, trains on each row as soon as it is full, and makes the loss a mean over all tokens of the
    step, so that its gradient is that of the unpacked batch."""
    post_rollout_overlong: Overlong | None = None
    """What happens to an answer that makes a segment longer than a packed row: `error` ends the run after a checkpoint,
    `cut` takes whole objects from the answer's end, as if it had been truncated there, `skip` trains on nothing of the
    sample, which `cut` does too where the true objects alone are too long. Null means `cut` with
    `post_rollout_pack_scope: step`; else the sample is a bad one, and counts against `training.max_bad_samples`."""
    decode_mode: DecodeMode = "greedy"
    """How rollouts are decoded: `greedy` (with `temperature` above 0: sampling) or `beam`, which only the hf backend
    has."""
    max_new_tokens: Positive = 512
    """Most tokens of one rollout. Prompt and answer together must fit `vllm.max_model_len`; dense images need
    thousands."""
    num_beams: Annotated[int, Field(ge=1, le=1024)] = 1
    """Beams of the hf backend's beam search. Only the best beam trains."""
    num_return_sequences: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Beams that beam search returns; null means all of them."""
    temperature: Weight = 0.0
    """Sampling temperature; 0 takes the most probable token each time. top_p is 1 and top_k is off, always."""
    repetition_penalty: Scale = 1.0
    """Factor against tokens that an answer already holds; 1 means none. 1.05 helps with long lists of objects."""
    repeat_terminate: RepeatTerminate = RepeatTerminate()
    """Early end of answers that repeat themselves."""
    candidate_top_k: Positive = 10
    """Ground-truth objects that each predicted object is compared with: the nearest by overlap of their boxes."""
    maskiou_gate: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Smallest mask IoU at which two objects may be matched; equal passes."""
    maskiou_resolution: Annotated[int, Field(ge=1, le=8192)] = 256
    """Side in pixels of the canvas on which masks are compared. On a canvas of 256, boxes under about 4 bins are
    unreliable."""
    maskiou_mode: MaskIouMode = "canvas"
    """How masks are compared: `canvas` draws every object on one canvas over the whole image; `analytic` computes box
    against box exactly and draws the rest; `supersample` does so too, and stretches the canvas over each pair that it
    draws, so that no object is too small."""
    maskiou_scales: list[Annotated[int, Field(ge=2, le=128)]] = Field(default=[], max_length=7)
    """Coarser grids on which masks are compared too: sides of their cells, in pixels of the canvas. A cell belongs to
    an object that has any of its pixels, and gate and cost take the mean of IoU over the canvas and these grids; empty
    means the canvas alone."""
    fp_cost: Weight = 1.0
    """Cost of leaving a predicted object unmatched; a match costs 1 - IoU."""
    fn_cost: Weight = 1.0
    """Cost of leaving a ground-truth object unmatched. A pair is matched only while 1 - IoU < fp_cost + fn_cost."""
    ot_cost: OtCost = "l2"
    """Distance between points when a polygon is matched: `l1`, or `l2` (not squared)."""
    ot_epsilon: Scale = 10.0
    """Entropic regularisation of the optimal transport between points, in the unit of `ot_epsilon_mode`. Large values
    pull small polygons together."""
    ot_epsilon_mode: OtEpsilonMode = "bins"
    """Unit of `ot_epsilon`: `bins`, or `relative` for thousandths of the true object's diagonal, which keeps small
    polygons from being taught to shrink."""
    ot_iters: Positive = 30
    """Sinkhorn iterations of the optimal transport."""
    ot_bbox_target: OtBboxTarget = "barycentric"
    """What a predicted box is taught when the true object is a polygon: `barycentric`, the box of its transported
    corners, or `aabb`, the polygon's own bounding box."""
    runaway: Runaway = Runaway()
    """End of a run whose answers run away."""
    supervised_share: Fraction = 0.0
    """Share of optimizer steps that train on the ground truth as stage 1 does, and make no rollouts. They lie evenly
    among the others, where the seed says."""
    missed_desc_weight: Weight = 0.0
    """Factor of the cross entropy of the descriptions of missed objects; 0 trains their structure and coordinates
    alone."""
    missed_place: MissedPlace = "tail"
    """Where missed objects are taught: `tail`, behind the answer; `sorted`, each before the first object of the answer
    that the record has after it; `shuffled`, at drawn places among the answer's objects."""
    duplicate_iou: Annotated[float, Field(gt=0, le=1)] | None = None
    """Overlap of bounding boxes from which an object of an answer repeats an earlier one of its description, and is
    taken out before matching; null leaves all in."""
    unmatched_objects: UnmatchedObjects = "neutral"
    """What becomes of an answer's objects that match nothing: `neutral` leaves them in without a loss, `dropped` takes
    them out, `penalised` leaves them in and teaches against the token that led on to each."""
    unmatched_weight: Scale = 0.1
    """Factor of that loss with `unmatched_objects: penalised`: of -log(1 - p), p being the token's probability."""
    recovery: Recovery = Recovery()
    """More weight for missed objects that further rollouts of the sample found."""
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
    """Weight of the loss that keeps probability on coordinate tokens where one belongs."""
    loss_normalizer: LossNormalizer = "micro"
    """What the loss is a mean over: `micro` means the supervised tokens of each micro-step, `window` those of the whole
    accumulation window in all learner processes, so that the loss does not depend on how samples are spread over
    micro-steps. `post_rollout_pack_scope: step` has a mean of its own."""
    rollout_buffer: RolloutBuffer = RolloutBuffer()
    """Reuse of one window of rollouts for several optimizer steps."""
    pipeline: Pipeline = Pipeline()
    """Rollouts of the next step while the current one trains (server mode)."""
    image_cache_gib: Weight = 4.0
    """Main memory for processed images in each learner process, in GiB. What does not fit is read and processed again
    when it is trained on; an image of a million pixels takes 0.025."""
    offload: OffloadSettings = OffloadSettings()
    """Main memory as a place for training state during colocated rollouts."""
    vllm: Vllm = Vllm()
    """Settings of vLLM: where it runs, with what, and how weights reach it."""
    debug_dump_parse_failures: bool = False
    """Whether rollouts that do not parse are logged, cut to 600 characters."""
    debug_dump_max: Count = 3
    """Most rollouts logged by `debug_dump_parse_failures` in a run."""
    monitor_dump: MonitorDump = MonitorDump()
    """Samples written to files for people to read."""
    desc_monitor: DescMonitor = DescMonitor()
    """Metrics of how well descriptions agree."""

    @property
    def overlong(self) -> Overlong | None:
        """What happens to an answer that is too long for a row; None: its sample is a bad one."""
        return self.post_rollout_overlong or ("cut" if self.post_rollout_pack_scope == "step" else None)

    @property
    def uses_servers(self) -> bool:
        """Whether rollouts come from rollout servers: from vLLM in server mode."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "server"

    @property
    def colocates(self) -> bool:
        """Whether rollouts come from a vLLM inside the learner's processes."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "colocate"
