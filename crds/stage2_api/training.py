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


class Training(Section):
    """How the optimizer runs."""

    output_dir: Path
    """Folder for checkpoints, logs and dumps."""
    run_name: Name | None = None
    """Name of the run in trackers; null means the output folder."""
    logging_dir: Path | None = None
    """Folder of TensorBoard files in ms-swift; ignored, trackers write into `output_dir`."""
    add_version: bool = False
    """Whether ms-swift would put a numbered folder into `output_dir`; ignored, a job that is restarted must find its
    checkpoints again."""
    num_train_epochs: Scale = 3.0
    """Passes over the training records, unless `max_steps` ends training."""
    max_steps: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    """Optimizer steps after which training ends; -1 leaves it to `num_train_epochs`."""
    per_device_train_batch_size: Positive = 1
    """Records of one micro-step in each learner process. Each one costs a rollout."""
    per_device_eval_batch_size: Positive = 1
    """Records of one evaluation step in each learner process."""
    effective_batch_size: Positive | None = None
    """Records of one optimizer step over all learner processes: gradient accumulation is this, divided by
    micro-batch and processes, rounded up."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-steps of one optimizer step; null means that `effective_batch_size` decides, or 1."""
    learning_rate: Weight = 5e-5
    """Peak learning rate."""
    vit_lr: Weight | None = None
    """Peak learning rate of the image encoder; null means `learning_rate`."""
    aligner_lr: Weight | None = None
    """Peak learning rate of the aligner; null means `learning_rate`."""
    optimizer: Literal["multimodal"] | None = None
    """Grouping of parameters: `multimodal` gives image encoder and aligner their own rates, which happens anyway when
    `vit_lr` or `aligner_lr` is set."""
    optim: Optim = "adamw_torch"
    """Optimizer, by transformers' names."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    adam_epsilon: Scale = 1e-8
    """Term that keeps Adam's denominator above zero."""
    weight_decay: Weight = 0.0
    """Weight decay, except of biases and norms."""
    lr_scheduler_type: Scheduler = "linear"
    """Course of the learning rate, by transformers' names."""
    lr_scheduler_kwargs: dict[str, float] = Field(default={}, max_length=16)
    """Mapping of more numbers that the course takes, such as `{min_lr: 1.0e-6}`."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of all optimizer steps in which the learning rate rises from zero."""
    warmup_steps: Count = 0
    """Optimizer steps in which the learning rate rises from zero; comes before `warmup_ratio` when above 0."""
    max_grad_norm: Weight = 1.0
    """Norm to which gradients are clipped; 0 means no clipping."""
    bf16: bool = False
    """Whether the forward pass runs in bfloat16 (autocast). Weights keep `model.torch_dtype`."""
    fp16: bool = False
    """Whether the forward pass runs in float16 (autocast)."""
    gradient_checkpointing: bool = True
    """Whether activations are computed again in the backward pass: slower by a third, but long answers fit."""
    seed: Count = 42
    """Seed of weights, data order and rollouts."""
    data_seed: Count | None = None
    """Seed of the data order; null means `seed`."""
    logging_steps: Positive = 10
    """Optimizer steps between two reports to trackers; `stage2_log.jsonl` has every step."""
    logging_first_step: bool = False
    """Whether the first step is reported too."""
    trace: bool = False
    """Whether `trace.json` in `output_dir` says what the learner and its servers did when; https://ui.perfetto.dev
    opens it. At most some 60 MB, of the run's beginning."""
    report_to: list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio", "none"]] = Field(
        default=[], max_length=6
    )
    """List of trackers that get the reports, each an extra of `stage2` but TensorBoard, which also gets pictures of
    held-out rollouts."""
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """When checkpoints are written."""
    save_steps: Positive = 500
    """Optimizer steps between two checkpoints."""
    save_total_limit: Positive | None = None
    """Checkpoints that are kept; older ones are removed, but not the best, nor the newest that the last proof of a sync
    vouches for. Null keeps all."""
    save_only_model: bool = False
    """Whether checkpoints hold only weights: smaller, but a restarted job starts anew."""
    save_safetensors: Literal[True] = True
    """File format of checkpoints: safetensors always."""
    save_last_epoch: bool = False
    """Whether ms-swift would also save after the last epoch; ignored, the last step is always saved."""
    save_delay_steps: Count | None = None
    """Optimizer steps before which ms-swift would write no checkpoint; ignored, a restarted job needs them."""
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """When evaluation runs: rollouts of `custom.val_jsonl`, matched, without loss."""
    eval_steps: Positive | None = None
    """Optimizer steps between two evaluations; null means `logging_steps`."""
    metric_for_best_model: Annotated[Name, Field(pattern=r"^[A-Za-z0-9_/.-]+$")] | None = None
    """Evaluation metric by which checkpoints are compared. Null means `eval_rollout_f1_class_iou50` in runs that
    evaluate, and none in GRPO runs. The best checkpoint is saved when it is found, whatever `save_steps` is, and
    kept."""
    greater_is_better: bool | None = None
    """Whether a larger metric is better; null means that its name decides (smaller for losses)."""
    load_best_model_at_end: bool = False
    """Whether the best checkpoint is loaded after the last step."""
    resume_from_checkpoint: Path | None = None
    """Checkpoint folder to go on from; null means the newest one in `output_dir`, if there is any."""
    resume: Literal["strict", "allow-changes"] = "strict"
    """Whether a checkpoint of other data, model, seed, schedule or objective may be gone on from: `strict` refuses it
    and names each difference; `allow-changes` says them and goes on."""
    max_bad_samples: Count = 100
    """Most samples of a run that are set aside, over all learner processes: for an image that cannot be read, an answer
    that fits no row, a prompt that a server does not take. Each is named in the log and counts once; one more ends the
    run, and 0 ends it at the first."""
    dataloader_num_workers: Count = 0
    """Processes that read records and images ahead; 0 reads in the learner itself."""
    dataloader_pin_memory: bool = True
    """Whether batches are put into page-locked memory."""
    dataloader_persistent_workers: bool = False
    """Whether reading processes live on between epochs."""
    dataloader_prefetch_factor: Positive | None = None
    """Batches that each reading process holds ready; null leaves PyTorch's own default."""
    dataloader_drop_last: bool = False
    """Whether a last incomplete batch is dropped. Recommended with `rollout_buffer`."""
    packing: bool = False
    """Whether several rollouts are packed into one row after matching."""
    packing_buffer: Positive = 512
    """Most segments that wait for packing; more is an error."""
    packing_min_fill_ratio: Annotated[Fraction, Field(gt=0)] = 0.65
    """Share of a packed row below which a warning is logged."""
    packing_drop_last: Literal[True] = True
    """Whether segments that are left at the end are dropped; flushing them is not supported."""
    packing_length: Positive | None = None
    """Length of packed rows in tokens. Deprecated: used only if neither `global_max_length` nor `template.max_length`
    is set."""
    eval_packing: bool = False
    """Whether evaluation would be packed; ignored, evaluation has no forward pass to pack."""
