"""GRPO with F1 as its reward, in one process: stage2's own GRPO trainer, with rollouts by the model that trains.

A GRPO job has a server of vLLM, so a configuration demands one; what it says of that server is not used here.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import GIB, Encoder, PromptCache
from stage2_trainer.data.run_records import load_run_records
from stage2_trainer.grpo.build import components, grpo_arguments
from stage2_trainer.grpo.shared_rollouts import SharedRollouts
from stage2_trainer.grpo.task import Task, record_rules
from stage2_trainer.grpo.trainer import GrpoTrainer
from stage2_trainer.model.policy import load_policy, load_processor
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.first_process import ProcessExchange
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.rollouts.in_process import HfRollouts
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.run_log import JsonLines, RunLog


def learn_rewarded(config: RunConfig) -> None:
    """Train as a GRPO configuration says, and write `checkpoint-N` with the weights after its last step."""
    output = Path(config.training.output_dir)
    with ExitStack() as stack:
        trainer = _trainer(config, output, stack)
        trainer.train()
    model: Any = trainer.model
    model.save_pretrained(output / f"checkpoint-{config.training.max_steps}")


def _trainer(config: RunConfig, output: Path, stack: ExitStack) -> GrpoTrainer:
    rlhf = config.rlhf
    assert rlhf is not None, "a GRPO run"
    output.mkdir(parents=True, exist_ok=True)
    log, rollout_log = RunLog(output), JsonLines(output / "rollouts.jsonl")
    stack.callback(log.close)
    stack.callback(rollout_log.close)
    data = load_run_records(config, record_rules(config))
    processor = load_processor(config.model.model, **config.template.pixel_limits())
    encoder, model, task = Encoder(processor), load_policy(config), Task.from_config(config)
    answers = config.training.per_device_train_batch_size
    decoding = Decoding(rlhf.max_completion_length, temperature=rlhf.temperature, batch_size=answers)
    backend = HfBackend(model, encoder, decoding, cache=PromptCache(encoder, GIB))
    reporter, interrupt = Reporter(), Interrupt()
    source = HfRollouts(backend, seed=config.training.seed, reporter=reporter, interrupt=interrupt)
    rollouts = SharedRollouts(source, data.train, task.chat, ProcessExchange(interrupt))
    context = RunContext("", reporter, interrupt, log, rollout_log)
    parts = components(config, data, task, encoder, rollouts, context)
    args = grpo_arguments(config, world_size=1, adapted=False)
    checkpoints = context.checkpoints(config)
    return GrpoTrainer(components=parts, checkpoints=checkpoints, model=model, args=args, processing_class=processor)
