"""GRPO: `rlhf`, `custom.extra.rollout_server` and `custom.grpo`.

What the learner does stands under `rlhf`, what its rollout server is started with under `rollout_server`, and neither
takes a key of the other: a key that does nothing where it stands would be believed.

Source: semantics section 15; key names as ms-swift has them.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from stage2_api.section import Count, Fraction, Name, Port, Positive, Scale, Section, Text, Weight, free_mapping

_DIGITS = re.compile(r"[0-9]+")


def integral(value: object) -> object:
    """Take `6.0` and `"6"` for 6, as files of ms-swift write it; anything else stays as it is."""
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def from_json(value: object) -> object:
    """Take a JSON text for what it says, as files of ms-swift write mappings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


PositiveNumber = Annotated[Positive, BeforeValidator(integral)]
RewardName = Annotated[
    str, StringConstraints(min_length=3, max_length=253, pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+$")
]


class Rlhf(Section):
    """The learner of a GRPO run: rewards, sampling, batches, and where its rollout server is."""

    rlhf_type: Literal["grpo"] = "grpo"
    """Algorithm: group-relative policy optimisation."""
    use_vllm: bool = False
    """Whether vLLM makes the rollouts. A GRPO run needs it."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """Where vLLM runs. A GRPO run needs `server`."""
    vllm_server_host: list[Literal["127.0.0.1", "localhost"]] = Field(default=["127.0.0.1"], min_length=1, max_length=1)
    """List of the one host of the rollout server: this machine. In a job the controller puts its own address there."""
    vllm_server_port: list[Port] = Field(default=[8080], min_length=1, max_length=1)
    """List of the one TCP port of the rollout server."""
    vllm_server_group_port: list[Port] = Field(default=[51216], min_length=1, max_length=1)
    """List of the one TCP port on the learner's side at which the server joins the weight-transfer group."""
    vllm_server_timeout: Scale = 240.0
    """Seconds to wait for the server to answer and to join the weight-transfer group."""
    reward_funcs: list[RewardName] = Field(min_length=1, max_length=64)
    """List of rewards by name, such as `summary.format`. Packages add their own under the entry point
    `stage2.rewards`."""
    reward_weights: list[Annotated[float, Field()]] | None = Field(None, min_length=1, max_length=64)
    """List of the rewards' weights, in the order of `reward_funcs`; null means 1 for each."""
    num_generations: Annotated[int, Field(ge=2, le=4096)] = 8
    """Answers to each prompt: the group over which advantages are relative."""
    generation_batch_size: Positive | None = None
    """Answers of one round of rollouts over all learner processes; null means that `steps_per_generation` decides."""
    steps_per_generation: Positive | None = None
    """Micro-steps that train on one round of rollouts; null means that `generation_batch_size` decides, or as many as
    gradient accumulation has."""
    num_iterations: Positive = 1
    """Passes over each round of rollouts."""
    temperature: Scale = 1.0
    """Sampling temperature of rollouts, by which the learner divides its logits too."""
    repetition_penalty: Scale = 1.0
    """Factor against tokens that an answer already holds; 1 means none."""
    max_completion_length: Positive = 512
    """Most tokens of one answer. Prompt and answer together must fit `rollout_server.vllm_max_model_len`."""
    beta: Weight = 0.04
    """Weight of the divergence from the model before training; 0 means none, and saves a forward pass."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clipping of the probability ratio below, and above where `epsilon_high` is unset."""
    epsilon_high: Scale | None = None
    """Clipping of the probability ratio above; null means `epsilon`."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    """What the loss is a mean over: `grpo` tokens of each answer and then answers, `bnpo` tokens of the micro-batch,
    `dr_grpo` a constant length, `dapo` tokens of the whole step."""
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """How rewards become advantages: `grpo` subtracts the group's mean, `rloo` the mean of the group's others,
    `reinforce_plus_plus` the group's mean, and scales by the spread of what is left."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Over what the spread is taken that advantages are divided by; null means `group` for grpo, `none` for rloo,
    `batch` for reinforce_plus_plus."""
    kl_in_reward: bool = False
    """Whether the divergence is taken off the rewards instead of being added to the loss."""
    truncation_strategy: Literal["left", "delete"] = "left"
    """What ms-swift does with prompts that are too long; ignored, a prompt that is too long is refused."""
    dynamic_sample: bool = False
    """Whether prompts whose answers all score the same are replaced by others."""
    max_resample_times: Positive = 3
    """Most rounds of such replacement."""

    @property
    def resolved_scale(self) -> Literal["group", "batch", "none"]:
        """`scale_rewards`, or what it means when unset."""
        by_estimator: dict[str, Literal["group", "batch", "none"]] = {"rloo": "none", "reinforce_plus_plus": "batch"}
        return self.scale_rewards or by_estimator.get(self.advantage_estimator, "group")

    @property
    def resolved_weights(self) -> list[float]:
        """`reward_weights`, or 1 for each reward."""
        return self.reward_weights or [1.0] * len(self.reward_funcs)


class RolloutServer(Section):
    """The rollout server of a GRPO run: how vLLM is started. None of it is read by the learner's side."""

    lists_its_keys: ClassVar[bool] = True

    vllm_tensor_parallel_size: PositiveNumber | None = None
    """GPUs that share one copy of the model. Needed, unless `custom.grpo.batch_plan` forces it."""
    vllm_data_parallel_size: PositiveNumber | None = None
    """Copies of the model. Needed, unless `custom.grpo.batch_plan` forces it; copies times GPUs of each are the rollout
    GPUs."""
    vllm_max_model_len: PositiveNumber
    """Longest prompt plus answer in tokens; at least `global_max_length`."""
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of each GPU's memory that vLLM takes. Raise it once a run is stable."""
    vllm_max_num_seqs: PositiveNumber = 256
    """Most sequences that each copy runs at once."""
    vllm_enable_prefix_caching: bool = True
    """Whether vLLM reuses the attention cache of equal prompt beginnings: the answers to one prompt share it."""
    vllm_disable_custom_all_reduce: bool = True
    """Whether vLLM leaves all-reduce to NCCL."""
    vllm_enforce_eager: bool = False
    """Whether vLLM runs without CUDA graphs: slower, starts sooner, needs less memory."""
    vllm_limit_mm_per_prompt: Annotated[dict[str, Count] | None, BeforeValidator(from_json)] = Field(
        None, max_length=16
    )
    """Mapping, or JSON, from a kind of input to how many one prompt may hold, such as `{image: 1, video: 0}`."""
    vllm_enable_lora: bool = False
    """Whether vLLM could load adapters. Refused: adapters of image encoders and DoRA travel merged."""
    vllm_max_lora_rank: PositiveNumber | None = None
    """Rank of such adapters. Refused, whatever it is."""
    vllm_use_async_engine: bool | None = None
    """Whether ms-swift would start vLLM's asynchronous engine; ignored, these servers always do."""
    vllm_engine_kwargs: Annotated[
        dict[str, Any] | None,
        BeforeValidator(from_json),
        Field(json_schema_extra={"x-stage2-schema": free_mapping(64)}),
    ] = Field(None, max_length=64)
    """Mapping, or JSON, of more of vLLM's engine arguments of speed and memory, by their names there."""
    vllm_mm_processor_cache_gb: Weight | None = None
    """GiB of main memory in which vLLM keeps processed images. Unset leaves vLLM's own default."""
    vllm_disable_cascade_attn: bool | None = None
    """Whether vLLM leaves cascade attention out. Unset leaves vLLM's own default."""
    vllm_quantization: Name | None = None
    """Quantisation of vLLM's weights by its name there. Unset means none."""

    def passed_through(self) -> dict[str, Any]:
        """Return the engine arguments that only a GRPO server takes, by vLLM's names."""
        named = ("mm_processor_cache_gb", "disable_cascade_attn", "quantization")
        given = {name: value for name in named if (value := getattr(self, f"vllm_{name}")) is not None}
        return {**given, **(self.vllm_engine_kwargs or {})}


Word = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Words = Annotated[list[Word], Field(max_length=256)]


class SummaryKeys(Section):
    """Keys of the JSON line."""

    items: Word = "items"
    """Key of the list of items."""
    category: Word = "category"
    """Key of an item's category."""
    notes: Word = "notes"
    """Key of the list of notes, in domains that have them."""
    groups: Word = "groups"
    """Key of the mapping from group to count, in domains that have them."""
    forbidden: Words = Field(default=[])
    """List of keys that make the JSON invalid."""


class SummaryIrrelevant(Section):
    """Images that are to be answered with a fixed text."""

    source: Name = "irrelevant_summary"
    """Value of the record's `_fusion_source` that marks them."""
    text: Annotated[Text, Field(min_length=1)] = "irrelevant image"
    """Answer to such an image, whole."""


class SummaryCategory(Section):
    """What an item of one category must and may say."""

    name: Word
    """Name of the category."""
    required: Words = Field(default=[])
    """List of attributes that an item must have."""
    any_of: list[Words] = Field(default=[], max_length=64)
    """List of groups of attributes; an item must have one of each group."""
    allowed: Words = Field(default=[])
    """List of attributes that an item may have beside those."""


class SummaryDomain(Section):
    """One kind of images with a vocabulary of its own."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z]+$")]
    """Name of the domain, as the header line has it."""
    template: Name
    """Value of the record's `_fusion_template` that marks it."""
    prompt: Text | None = None
    """Text part of the user's turn; null means `custom.user_prompt`."""
    notes: bool = False
    """Whether summaries may have notes."""
    groups: bool = False
    """Whether summaries may have group counts."""
    tversky_fp: Fraction = 0.3
    """Weight of a fact too many in `summary.content_structured_tversky`; one that is missing weighs 1."""
    tversky_ignored: Words = Field(default=[])
    """List of attributes, and of the key of notes, that this reward leaves out."""
    digit_attributes: Words = Field(default=[])
    """List of attributes whose values must be numbers."""
    categories: list[SummaryCategory] = Field(default=[], max_length=256)
    """List of the categories that items may have."""


class Summary(Section):
    """Contract of summaries."""

    task: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z]+$")] = "SUMMARY"
    """Name of the task, as the header line has it."""
    keys: SummaryKeys = SummaryKeys()
    """Keys of the JSON line."""
    irrelevant: SummaryIrrelevant = SummaryIrrelevant()
    """Images that are to be answered with a fixed text."""
    domains: list[SummaryDomain] = Field(min_length=1, max_length=16)
    """List of the domains."""
    text_attributes: Words = Field(default=[])
    """List of attributes whose values are text read from the image."""
    number_attributes: Words = Field(default=[])
    """List of attributes of whose values only the first digits count."""
    stable_attributes: Words = Field(default=[])
    """List of attributes whose values are a closed set, scored one by one by `summary.attr_path_recall`."""


class Chord(Section):
    """Supervised fine-tuning mixed into GRPO: loss = (1 - mu) GRPO + mu SFT (CHORD, arXiv 2508.11408)."""

    enabled: bool = False
    """Whether reference answers are learnt beside the rollouts; all keys of this section are needed then."""
    sft_per_device_train_batch_size: Positive | None = None
    """Reference answers of one micro-step in each learner process."""
    mu_warmup_steps: Count | None = None
    """Optimizer steps in which mu rises from 0 to `mu_peak`."""
    mu_decay_steps: Count | None = None
    """Optimizer steps after that in which mu falls along a cosine to `mu_valley`."""
    mu_peak: Fraction | None = None
    """Largest share of the supervised loss."""
    mu_valley: Fraction | None = None
    """Share of the supervised loss from then on."""
    enable_phi_function: bool | None = None
    """Whether tokens of which the model is sure, either way, count less: each is weighed with p (1 - p)."""


class BatchPlanServer(Section):
    """What the batch plan says about the rollout server."""

    force_vllm_tensor_parallel_size: PositiveNumber | None = None
    """GPUs that share one copy of the model."""
    force_vllm_data_parallel_size: PositiveNumber | None = None
    """Copies of the model."""
    max_num_seqs_per_gpu: PositiveNumber | None = None
    """Most sequences at once for each GPU of a copy."""


class BatchPlan(Section):
    """One number for all batches: what an optimizer step trains on is what a round of rollouts makes."""

    enabled: bool = False
    """Whether the plan sets batch sizes."""
    per_device_train_batch_size: PositiveNumber | None = None
    """Answers of one micro-step in each learner process. Needed."""
    per_device_eval_batch_size: PositiveNumber | None = None
    """Answers of one evaluation step; the same, or unset."""
    unified_batch_size: PositiveNumber | None = None
    """Answers of one optimizer step and of one round of rollouts. Needed."""
    rollout_server: BatchPlanServer = BatchPlanServer()
    """Rollout server: what the plan forces there."""


class Grpo(Section):
    """What GRPO trains on, beside `rlhf`."""

    summary: Summary | None = None
    """Contract of summaries, in the words of their owner; needed by rewards named `summary.*`."""
    chord: Chord = Chord()
    """Supervised fine-tuning mixed in."""
    batch_plan: BatchPlan = BatchPlan()
    """Batch sizes from one number."""
