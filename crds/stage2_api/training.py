"""`training`: the optimizer's schedule, batches, packing, logging and checkpoints.

Keys that transformers' TrainingArguments has carry its names and its meaning. Source of the others: semantics
sections 3 and 7.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.section import Count, Fraction, Name, Path, Positive, Scale, Section, Weight

Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip
Optim = Literal[
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_8bit", "adamw_bnb_8bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit",
    "ademamix", "ademamix_8bit", "schedule_free_adamw", "stable_adamw",
]  # fmt: skip


Tracker = Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio", "none"]
"""Where figures are reported; each but TensorBoard is an extra of the `stage2` package, and in the image for GPUs."""


class Training(Section):
    """How the optimizer runs."""

    output_dir: Path
    """Folder for checkpoints, logs and dumps."""
    run_name: Name | None = None
    """Name of the run in trackers; null means the output folder."""
    logging_dir: Path | None = None
    """Folder of ms-swift's TensorBoard files. Ignored: trackers write into `output_dir`."""
    add_version: bool = False
    """Whether ms-swift creates a numbered folder in `output_dir`. Ignored: a restarted job must find its
    checkpoints."""
    num_train_epochs: Scale = 3.0
    """Passes over the training records, unless `max_steps` is set."""
    max_steps: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    """Optimizer steps after which training ends; -1 means `num_train_epochs` decides."""
    per_device_train_batch_size: Positive = 1
    """Records of one micro-step in each learner process. Each record takes one rollout."""
    per_device_eval_batch_size: Positive = 1
    """Records of one evaluation step in each learner process."""
    effective_batch_size: Positive | None = None
    """Records of one optimizer step over all learner processes. Gradient accumulation is this number divided by
    micro-batch and processes, rounded up."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-steps of one optimizer step; null means `effective_batch_size` decides, else 1."""
    learning_rate: Weight = 5e-5
    """Peak learning rate."""
    vit_lr: Weight | None = None
    """Peak learning rate of the image encoder; null means `learning_rate`."""
    aligner_lr: Weight | None = None
    """Peak learning rate of the aligner; null means `learning_rate`."""
    optimizer: Literal["multimodal"] | None = None
    """Parameter groups: `multimodal` gives image encoder and aligner their own learning rates, as `vit_lr` and
    `aligner_lr` do anyway."""
    optim: Optim = "adamw_torch"
    """Optimizer, by its name in transformers."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    adam_epsilon: Scale = 1e-8
    """Epsilon in Adam's denominator."""
    weight_decay: Weight = 0.0
    """Weight decay of all parameters except biases and norms."""
    lr_scheduler_type: Scheduler = "linear"
    """Learning-rate schedule, by its name in transformers."""
    lr_scheduler_kwargs: dict[str, float] = Field(default={}, max_length=16)
    """Mapping of the schedule's own parameters, such as `{min_lr: 1.0e-6}`."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of all optimizer steps that warm up the learning rate from zero."""
    warmup_steps: Count = 0
    """Optimizer steps that warm up the learning rate from zero; above 0 it overrides `warmup_ratio`."""
    max_grad_norm: Weight = 1.0
    """Maximum gradient norm; 0 means no clipping."""
    bf16: bool = False
    """Whether the forward pass runs in bfloat16 (autocast). Weights keep `model.torch_dtype`; with deepspeed they are
    held in bfloat16, with copies in float32 of what trains."""
    fp16: bool = False
    """Whether the forward pass runs in float16 (autocast); with deepspeed weights are held in float16, with copies in
    float32 of what trains."""
    gradient_checkpointing: bool = True
    """Whether to recompute activations in the backward pass: a third slower, but long answers fit into memory."""
    seed: Count = 42
    """Seed of weights, data order and rollouts."""
    data_seed: Count | None = None
    """Seed of the data order; null means `seed`."""
    logging_steps: Positive = 10
    """Optimizer steps between reports to trackers; `stage2_log.jsonl` has every step."""
    logging_first_step: bool = False
    """Whether to report the first step too."""
    trace: bool = False
    """Whether to write `trace.json` into `output_dir`: a timeline of learner and servers for https://ui.perfetto.dev.
    It covers the beginning of the run, up to about 60 MB."""
    report_to: list[Tracker] = Field(default=[], max_length=6)
    """List of trackers. The GPU image has all; elsewhere, each but TensorBoard is an extra of the `stage2` package.
    wandb, trackio and mlflow also get a table of eight held-out answers with pictures at each evaluation."""
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """When to write checkpoints."""
    save_steps: Positive = 500
    """Optimizer steps between checkpoints."""
    save_total_limit: Positive | None = None
    """Number of checkpoints to keep. Older ones are removed, except the best one and the newest one from before the
    last proof of a sync. Null keeps all."""
    save_only_model: bool = False
    """Whether checkpoints hold only weights. They are smaller, but a restarted job goes on with a new optimizer and
    schedule; with deepspeed it is refused, unless the checkpoint keeps the weights in shards."""
    save_safetensors: Literal[True] = True
    """Whether checkpoints are safetensors; they always are."""
    save_last_epoch: bool = False
    """Whether ms-swift also saves after the last epoch. Ignored: the last step is always saved."""
    save_delay_steps: Count | None = None
    """Optimizer steps before ms-swift's first checkpoint. Ignored: a restarted job needs early checkpoints."""
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """When to evaluate: generate and match rollouts of `custom.val_jsonl`, without a loss."""
    eval_steps: Positive | None = None
    """Optimizer steps between evaluations; null means `logging_steps`."""
    metric_for_best_model: Annotated[Name, Field(pattern=r"^[A-Za-z0-9_/.-]+$")] | None = None
    """Evaluation metric that decides which checkpoint is best. Null means `eval_rollout_f1_class_iou50` if the run
    evaluates, and none in GRPO runs. The best checkpoint is saved immediately, whatever `save_steps` is, and kept."""
    greater_is_better: bool | None = None
    """Whether a larger metric is better; null means its name decides (smaller for losses)."""
    load_best_model_at_end: bool = False
    """Whether transformers loads the best checkpoint after the last step. Ignored: nothing is trained or saved after
    that. The best checkpoint is kept in any case, and `stage2 export` takes it from the run's folder."""
    resume_from_checkpoint: Path | None = None
    """Checkpoint folder to resume from; null means the newest one in `output_dir`, if any."""
    resume: Literal["strict", "allow-changes"] = "strict"
    """Whether a run may resume from a checkpoint with other data, model, seed, schedule or objective: `strict` refuses
    and lists the differences; `allow-changes` logs them and resumes."""
    max_bad_samples: Count = 100
    """Maximum number of bad samples in a run, over all learner processes: unreadable images, answers too long for a
    row, prompts that a server refuses. Each is skipped, logged and counted once; one more ends the run."""
    dataloader_num_workers: Count = 0
    """Worker processes that prefetch records and images; 0 reads them in the learner itself."""
    dataloader_pin_memory: bool = True
    """Whether to put batches into page-locked memory."""
    dataloader_persistent_workers: bool = False
    """Whether worker processes survive between epochs."""
    dataloader_prefetch_factor: Positive | None = None
    """Batches that each worker process prefetches; null means PyTorch's default."""
    dataloader_drop_last: bool = False
    """Whether to drop an incomplete last batch. Recommended with `rollout_buffer`."""
    packing: bool = False
    """Whether to pack several rollouts into one row after matching."""
    packing_buffer: Positive = 512
    """Maximum number of segments that wait for packing; more is an error."""
    packing_min_fill_ratio: Annotated[Fraction, Field(gt=0)] = 0.65
    """Fill ratio of a packed row below which a warning is logged."""
    packing_drop_last: Literal[True] = True
    """Whether to drop the segments that remain at the end; flushing them is not supported."""
    packing_length: Positive | None = None
    """Length of packed rows in tokens. Deprecated: used only if neither `global_max_length` nor `template.max_length`
    is set."""
    eval_packing: bool = False
    """Whether to pack evaluation. Ignored: evaluation has no forward pass to pack."""
