"""GRPO: `rlhf`, `custom.extra.rollout_server` and `custom.grpo`.

`rlhf` configures the learner and `rollout_server` the server. Neither accepts the other's keys, because nobody would
notice a key that does nothing.

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
    """Return 6 for `6.0` and `"6"`, as files of ms-swift write it; return anything else unchanged."""
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def from_json(value: object) -> object:
    """Parse JSON text, as files of ms-swift write mappings; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


PositiveNumber = Annotated[Positive, BeforeValidator(integral)]
_BY_NAME = r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+"
_IN_A_FILE = r"[A-Za-z_][A-Za-z0-9_]*\.py:[A-Za-z_][A-Za-z0-9_]*"
RewardName = Annotated[str, StringConstraints(min_length=3, max_length=253, pattern=f"^({_BY_NAME}|{_IN_A_FILE})$")]
LARGEST_REWARD_FILE = 32_768
"""Characters of a file with rewards; a job with all else has room for some."""
RewardFile = Annotated[str, StringConstraints(max_length=LARGEST_REWARD_FILE)]


def reward_file(name: object) -> str | None:
    """Return the file of a reward that is named by one, as `FILE.py:FUNCTION`; None for any other value."""
    in_a_file = isinstance(name, str) and re.fullmatch(_IN_A_FILE, name)
    return name.partition(":")[0] if isinstance(name, str) and in_a_file else None


class Rlhf(Section):
    """The learner of a GRPO run: rewards, sampling, batches, and where its rollout server is."""

    rlhf_type: Literal["grpo"] = "grpo"
    """Algorithm: group-relative policy optimisation."""
    use_vllm: bool = False
    """Whether vLLM makes the rollouts. Must be true in a GRPO run."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """Where vLLM runs. Must be `server` in a GRPO run."""
    vllm_server_host: list[Literal["127.0.0.1", "localhost"]] = Field(default=["127.0.0.1"], min_length=1, max_length=1)
    """List with the host of the one rollout server: this machine. In a job the controller fills in the address."""
    vllm_server_port: list[Port] = Field(default=[8080], min_length=1, max_length=1)
    """List with the TCP port of the one rollout server."""
    vllm_server_group_port: list[Port] = Field(default=[51216], min_length=1, max_length=1)
    """List with the learner's TCP port at which the server joins the weight-transfer group."""
    vllm_server_timeout: Scale = 240.0
    """Seconds to wait for the server to answer and to join the weight-transfer group."""
    reward_funcs: list[RewardName] = Field(min_length=1, max_length=64)
    """List of rewards by name, such as `objects.f1_class`, or by a Python file beside this one and a function in it,
    as `my_rewards.py:small`. Packages add rewards under the entry point `stage2.rewards`."""
    reward_files: dict[str, RewardFile] | None = Field(None, min_length=1, max_length=8)
    """Text of each file that `reward_funcs` names, by the file's name. Null: commands of stage2 read the files beside
    the configuration. `stage2 render --job` writes them into a job, which carries them to its learner."""
    reward_weights: list[Annotated[float, Field()]] | None = Field(None, min_length=1, max_length=64)
    """List of weights, in the order of `reward_funcs`; null means 1 for each."""
    num_generations: Annotated[int, Field(ge=2, le=4096)] = 8
    """Answers per prompt: the group that advantages are relative to."""
    generation_batch_size: Positive | None = None
    """Answers of one round of rollouts over all learner processes; null means `steps_per_generation` decides."""
    steps_per_generation: Positive | None = None
    """Micro-steps that train on one round of rollouts; null means `generation_batch_size` decides, else gradient
    accumulation."""
    num_iterations: Positive = 1
    """Passes over each round of rollouts."""
    temperature: Scale = 1.0
    """Sampling temperature of rollouts. The learner divides its logits by it too."""
    repetition_penalty: Scale = 1.0
    """Penalty on tokens that an answer already contains; 1 means none."""
    max_completion_length: Positive = 512
    """Maximum number of tokens of one answer. Prompt and answer together must fit
    `rollout_server.vllm_max_model_len`."""
    beta: Weight = 0.04
    """Weight of the KL divergence from the initial model; 0 means none, and saves a forward pass."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clipping range of the probability ratio; the upper one too unless `epsilon_high` is set."""
    epsilon_high: Scale | None = None
    """Upper clipping range of the probability ratio; null means `epsilon`."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    """How the loss is averaged: `grpo` over the tokens of each answer and then over answers, `bnpo` over the tokens of
    the micro-batch, `dr_grpo` by a constant length, `dapo` over the tokens of the whole step."""
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """How rewards become advantages: `grpo` subtracts the group's mean, `rloo` the mean of the other answers, and
    `reinforce_plus_plus` subtracts the group's mean and scales by the standard deviation of the result."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Scope of the standard deviation that divides advantages; null means `group` for grpo, `none` for rloo, `batch`
    for reinforce_plus_plus."""
    kl_in_reward: bool = False
    """Whether to subtract the KL divergence from the rewards instead of adding it to the loss."""
    truncation_strategy: Literal["left", "delete"] = "left"
    """Treatment of prompts that are too long in ms-swift. Ignored: such prompts are refused."""
    dynamic_sample: bool = False
    """Whether to replace prompts whose answers all score the same. Must be false: stage2 does not replace them."""
    max_resample_times: Positive = 3
    """Maximum rounds of replacement. Ignored, because `dynamic_sample` must be false."""

    @property
    def files_named(self) -> set[str]:
        """The files that `reward_funcs` names."""
        return {file for name in self.reward_funcs if (file := reward_file(name))}

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
    """The rollout server of a GRPO run: arguments of vLLM. The learner reads none of them."""

    lists_its_keys: ClassVar[bool] = True

    vllm_tensor_parallel_size: PositiveNumber | None = None
    """GPUs that share one copy of the model. Required unless `custom.grpo.batch_plan` forces it."""
    vllm_data_parallel_size: PositiveNumber | None = None
    """Copies of the model. Required unless `custom.grpo.batch_plan` forces it. The server needs copies times GPUs per
    copy."""
    vllm_max_model_len: PositiveNumber
    """Maximum length of prompt plus answer in tokens; at least `global_max_length`."""
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of each GPU's memory for vLLM. Raise it once a run is stable."""
    vllm_max_num_seqs: PositiveNumber = 256
    """Maximum number of concurrent sequences per copy."""
    vllm_enable_prefix_caching: bool = True
    """Whether vLLM reuses the KV cache of common prompt prefixes, which the answers to one prompt share."""
    vllm_disable_custom_all_reduce: bool = True
    """Whether vLLM uses NCCL for all-reduce."""
    vllm_enforce_eager: bool = False
    """Whether vLLM runs without CUDA graphs: slower, but it starts sooner and needs less memory."""
    vllm_limit_mm_per_prompt: Annotated[dict[str, Count] | None, BeforeValidator(from_json)] = Field(
        None, max_length=16
    )
    """Mapping, or JSON, of the inputs of each kind that a prompt may have, such as `{image: 1, video: 0}`."""
    vllm_enable_lora: bool = False
    """Whether vLLM can load adapters. Must be false: the learner sends merged weights."""
    vllm_max_lora_rank: PositiveNumber | None = None
    """Rank of such adapters. Must be unset."""
    vllm_use_async_engine: bool | None = None
    """Whether ms-swift starts vLLM's asynchronous engine. Ignored: stage2's servers always do."""
    vllm_engine_kwargs: Annotated[
        dict[str, Any] | None,
        BeforeValidator(from_json),
        Field(json_schema_extra={"x-stage2-schema": free_mapping(64)}),
    ] = Field(None, max_length=64)
    """Mapping, or JSON, of other engine arguments of vLLM for speed and memory."""
    vllm_mm_processor_cache_gb: Weight | None = None
    """GiB of main memory for vLLM's cache of processed images. Unset means vLLM's default."""
    vllm_disable_cascade_attn: bool | None = None
    """Whether vLLM turns cascade attention off. Unset means vLLM's default."""
    vllm_quantization: Name | None = None
    """Quantisation of vLLM's weights, by its name in vLLM. Unset means none."""

    def passed_through(self) -> dict[str, Any]:
        """Return the engine arguments that only a GRPO server has, by vLLM's names."""
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
    """Images that need a fixed answer."""

    source: Name = "irrelevant_summary"
    """Value of the record's `_fusion_source` that marks them."""
    text: Annotated[Text, Field(min_length=1)] = "irrelevant image"
    """The whole answer to such an image."""


class SummaryCategory(Section):
    """Required and allowed attributes of one category."""

    name: Word
    """Name of the category."""
    required: Words = Field(default=[])
    """List of attributes that an item must have."""
    any_of: list[Words] = Field(default=[], max_length=64)
    """List of attribute groups; an item must have one attribute of each."""
    allowed: Words = Field(default=[])
    """List of further attributes that an item may have."""


class SummaryDomain(Section):
    """One kind of images with its own vocabulary."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z]+$")]
    """Name of the domain in the header line."""
    template: Name
    """Value of the record's `_fusion_template` that marks it."""
    prompt: Text | None = None
    """Text of the user message; null means `custom.user_prompt`."""
    notes: bool = False
    """Whether summaries may have notes."""
    groups: bool = False
    """Whether summaries may have group counts."""
    tversky_fp: Fraction = 0.3
    """Weight of an extra fact in `summary.content_structured_tversky`; a missing fact weighs 1."""
    tversky_ignored: Words = Field(default=[])
    """List of attributes, or the key of notes, that this reward ignores."""
    digit_attributes: Words = Field(default=[])
    """List of attributes whose values must be numbers."""
    categories: list[SummaryCategory] = Field(default=[], max_length=256)
    """List of the categories that items may have."""


class Summary(Section):
    """Format of the summaries."""

    task: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z]+$")] = "SUMMARY"
    """Name of the task in the header line."""
    keys: SummaryKeys = SummaryKeys()
    """Keys of the JSON line."""
    irrelevant: SummaryIrrelevant = SummaryIrrelevant()
    """Images that need a fixed answer."""
    domains: list[SummaryDomain] = Field(min_length=1, max_length=16)
    """List of the domains."""
    text_attributes: Words = Field(default=[])
    """List of attributes with text read from the image."""
    number_attributes: Words = Field(default=[])
    """List of attributes whose first digits alone count."""
    stable_attributes: Words = Field(default=[])
    """List of attributes with a closed set of values, which `summary.attr_path_recall` scores individually."""


class Chord(Section):
    """Supervised fine-tuning mixed into GRPO: loss = (1 - mu) GRPO + mu SFT (CHORD, arXiv 2508.11408)."""

    enabled: bool = False
    """Whether to train on reference answers too; then every key of this section is required."""
    sft_per_device_train_batch_size: Positive | None = None
    """Reference answers of one micro-step in each learner process."""
    mu_warmup_steps: Count | None = None
    """Optimizer steps over which mu rises from 0 to `mu_peak`."""
    mu_decay_steps: Count | None = None
    """Optimizer steps after the warm-up over which mu falls along a cosine to `mu_valley`."""
    mu_peak: Fraction | None = None
    """Largest share of the supervised loss."""
    mu_valley: Fraction | None = None
    """Final share of the supervised loss."""
    enable_phi_function: bool | None = None
    """Whether to weight each token by p (1 - p), so that tokens the model is sure about count less."""


class BatchPlanServer(Section):
    """Settings that the batch plan forces on the rollout server."""

    force_vllm_tensor_parallel_size: PositiveNumber | None = None
    """GPUs that share one copy of the model."""
    force_vllm_data_parallel_size: PositiveNumber | None = None
    """Copies of the model."""
    max_num_seqs_per_gpu: PositiveNumber | None = None
    """Maximum number of concurrent sequences per GPU of a copy."""


class BatchPlan(Section):
    """One size for all batches: an optimizer step trains on exactly one round of rollouts."""

    enabled: bool = False
    """Whether the plan sets batch sizes."""
    per_device_train_batch_size: PositiveNumber | None = None
    """Answers of one micro-step in each learner process. Required."""
    per_device_eval_batch_size: PositiveNumber | None = None
    """Answers of one evaluation step; unset or equal to `per_device_train_batch_size`."""
    unified_batch_size: PositiveNumber | None = None
    """Answers of one optimizer step and of one round of rollouts. Required."""
    rollout_server: BatchPlanServer = BatchPlanServer()
    """Settings forced on the rollout server."""


class Grpo(Section):
    """Data and batches of GRPO, in addition to `rlhf`."""

    summary: Summary | None = None
    """Format of the summaries, which rewards named `summary.*` need."""
    chord: Chord = Chord()
    """Supervised fine-tuning mixed in."""
    batch_plan: BatchPlan = BatchPlan()
    """Batch sizes from one number."""
