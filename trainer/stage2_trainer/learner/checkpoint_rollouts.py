"""The held-out rollouts of checkpoints, by the learner's own evaluation, in the format of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.run_records import RunRecords
from stage2_trainer.learner.build import build_trainer
from stage2_trainer.learner.trainer import RolloutMatchingTrainer
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.supported import in_process
from stage2_trainer.process.tensor_files import refuse_code, tensors_alone
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.run_log import JsonLines, SilentLog
from stage2_trainer.wire.credentials import read_token

logger = logging.getLogger(__name__)


def write_checkpoint_rollouts(
    config: RunConfig, records: RunRecords, checkpoints: Sequence[Path], output: Path
) -> list[int]:
    """Answer the held-out records with each checkpoint's weights; return how many samples of each were set aside.

    output: file of the rollouts; those of checkpoint n have step n, from 0. Nothing else is written outside
    `training.output_dir`.

    Raises:
        ConfigError: a checkpoint does not fit the configuration.
        ServerError: servers were lost, and did not come back.
    """
    interrupt, lines = Interrupt(), JsonLines(output)
    with ExitStack() as stack:
        stack.callback(lines.close)
        stack.enter_context(tensors_alone(deepspeed=config.uses_deepspeed))
        token = "" if in_process(config) else read_token(os.environ)
        context = RunContext(token, Reporter(), interrupt, SilentLog(), lines)
        trainer = build_trainer(config, records, context, stack)
        return [_answer(trainer, checkpoint, records, version=number) for number, checkpoint in enumerate(checkpoints)]


def _answer(trainer: RolloutMatchingTrainer, checkpoint: Path, records: RunRecords, *, version: int) -> int:
    _load(trainer, checkpoint)
    model: Any = trainer.model
    found = trainer.components.evaluation(records.held_out, model.eval(), global_step=version)
    logger.info("%s: %d records in %.0f s", checkpoint, len(records.held_out), found["runtime"])
    return int(found["bad_samples"])


def _load(trainer: RolloutMatchingTrainer, checkpoint: Path) -> None:
    refuse_code(checkpoint, path="--checkpoint")
    try:
        trainer._load_from_checkpoint(str(checkpoint))
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        rule = f"must hold weights of the configured model and tuner ({str(error).splitlines()[0][:200]})"
        way_out = "give the configuration that it was trained with"
        raise ConfigError([Problem("--checkpoint", str(checkpoint), rule, way_out)]) from error
