"""The construction of a GRPO learner: records, rewards, model, the server, and the trainer that holds them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.run_records import RunRecords
from stage2_trainer.grpo.loaded_rewards import load_rewards
from stage2_trainer.grpo.objective import References
from stage2_trainer.grpo.shared_rollouts import SharedRollouts
from stage2_trainer.grpo.task import Rows, Task
from stage2_trainer.grpo.trainer import GrpoComponents, GrpoTrainer
from stage2_trainer.model.attention import attention_here
from stage2_trainer.model.policy import Policy, load_policy, load_processor, part_rates
from stage2_trainer.model.training_arguments import training_options
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.rollouts.build import server_rollouts
from stage2_trainer.rollouts.first_process import FirstProcessRollouts, ProcessExchange
from stage2_trainer.rollouts.rollout_source import RolloutSource
from stage2_trainer.sync.fleet.proof import sample_probe
from stage2_trainer.telemetry.answer_tables import answer_tables
from stage2_trainer.telemetry.run_context import RunContext, report_reproducibility

_SAME_NAME = (
    "num_generations",
    "num_iterations",
    "temperature",
    "repetition_penalty",
    "max_completion_length",
    "epsilon",
    "epsilon_high",
    "loss_type",
)


def grpo_arguments(config: RunConfig, *, world_size: int, adapted: bool) -> Any:
    """Return the arguments of a run in `world_size` processes.

    adapted: whether adapters train. TRL then gets a beta of 0, for it would keep a copy of the adapter as the
    reference; a fresh adapter changes nothing, so the model without it is the reference.
    """
    rlhf = config.rlhf
    assert rlhf is not None, "a GRPO run"
    batches = config.grpo_batches(world_size)
    shared = training_options(config, world_size=world_size)
    planned = config.custom.grpo.batch_plan.enabled
    return GRPOConfig(
        **{
            **shared,
            **{name: getattr(rlhf, name) for name in _SAME_NAME},
            "per_device_train_batch_size": batches.per_device,
            "per_device_eval_batch_size": batches.per_device if planned else config.training.per_device_eval_batch_size,
            "gradient_accumulation_steps": batches.accumulation,
            "generation_batch_size": batches.generation,
            "num_generations_eval": 1,
            "scale_rewards": rlhf.resolved_scale,
            "reward_weights": rlhf.resolved_weights,
            "beta": 0.0 if adapted else rlhf.beta,
            "logging_steps": 1,  # every optimizer step is in the log
            "use_vllm": False,
            "shuffle_dataset": True,
        }
    )


def build_trainer(config: RunConfig, data: RunRecords, context: RunContext, stack: ExitStack) -> GrpoTrainer:
    """Load the policy, wait for the server, and put the trainer together; `stack` closes the connections."""
    trusted = config.model.allow_remote_code
    processor = load_processor(config.model.model, trusted, **config.template.pixel_limits())
    encoder, model, task = Encoder(processor), load_policy(config), Task.from_config(config)
    args = grpo_arguments(
        config, world_size=int(os.environ.get("WORLD_SIZE", "1")), adapted=config.tuner.train_type == "lora"
    )
    exchange = ProcessExchange(context.interrupt)

    def connect() -> RolloutSource:
        probe = sample_probe(encoder, task.chat(data.train[0], task.user_text(data.train[0], epoch=0)))
        policy = Policy(model.to(args.device), encoder, args.device, probe)
        return server_rollouts(config, policy, context, stack)

    source = FirstProcessRollouts(connect, context.interrupt)
    report_reproducibility(
        config,
        data.fingerprint,
        context,
        source.sync_state,
        engines=source.engines,
        attention=attention_here(config.model.attn_impl),
    )
    rollouts = SharedRollouts(source, [*data.train, *data.held_out], task.chat, exchange)
    parts = components(config, data, task, encoder, rollouts, context)
    checkpoints = context.checkpoints(config)
    return GrpoTrainer(components=parts, checkpoints=checkpoints, model=model, args=args, processing_class=processor)


def components(
    config: RunConfig, data: RunRecords, task: Task, encoder: Encoder, rollouts: SharedRollouts, context: RunContext
) -> GrpoComponents:
    """Return the components of a run's trainer."""
    rlhf = config.rlhf
    assert rlhf is not None, "a GRPO run"
    return GrpoComponents(
        rlhf=rlhf,
        rewards=load_rewards(rlhf.reward_funcs, rlhf.resolved_weights, files=rlhf.reward_files or {}),
        rollouts=rollouts,
        rows=Rows(data.train, task),
        held_out=Rows(data.held_out, task, first=len(data.train)) if data.held_out else None,
        references=References(data.train, task, encoder, config.training.seed),
        records=[*data.train, *data.held_out],
        bad=BadSamples(config.training.max_bad_samples, context.log),
        chord=config.custom.grpo.chord,
        interrupt=context.interrupt,
        reporter=context.reporter,
        log=context.log,
        rollout_log=context.rollout_log,
        tables=answer_tables(config),
        part_rates=part_rates(config),
    )
