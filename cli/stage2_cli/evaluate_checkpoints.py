"""`stage2 evaluate CONFIG --checkpoint DIR`: held-out records answered by checkpoints, and scored as all answers."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from stage2_api.errors import EXIT_RETRYABLE, ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import load_config
from stage2_cli.evaluate import EvaluationRequest, evaluate_rollouts
from stage2_trainer.data.model_files import with_local_model
from stage2_trainer.data.records import units_by
from stage2_trainer.preflight import checked_records
from stage2_trainer.process.checkpoints import flaw_of
from stage2_trainer.process.supported import check_supported
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG
from stage2_trainer.wire.errors import ServerError


def evaluate_checkpoints(path: Path, checkpoints: Sequence[Path], request: EvaluationRequest) -> int:
    """Answer with each checkpoint, score the answers and print the figures; 0, or 75 where servers were lost.

    request: how it is scored; its files are those of the configuration. Raises ConfigError.
    """
    config = load_config(path)
    _check(config, checkpoints)
    with tempfile.TemporaryDirectory(prefix="stage2-evaluate-") as folder:
        config = _for_evaluation(config, Path(folder))
        check_supported(config, world_size=1)
        records = checked_records(config, world_size=1)
        output = Path(folder) / ROLLOUT_LOG
        try:
            with redirect_stdout(sys.stderr):  # libraries speak there, and the figures are for machines too
                from stage2_trainer.learner.checkpoint_rollouts import write_checkpoint_rollouts

                write_checkpoint_rollouts(with_local_model(config), records, checkpoints, output)
        except ServerError as error:
            print(error, file=sys.stderr)
            return EXIT_RETRYABLE
        custom = config.custom
        return evaluate_rollouts(
            replace(
                request,
                rollouts=[f"{output}@{number}" for number in range(len(checkpoints))],
                records=Path(custom.val_jsonl or ""),
                units=units_by(custom.coord_tokens.skip_bbox_norm),
                limit=custom.val_sample_limit,
                labels=[str(one) for one in checkpoints],
            )
        )


def _check(config: RunConfig, checkpoints: Sequence[Path]) -> None:
    """Raise ConfigError for what cannot be evaluated, before anything heavy is imported."""
    problems = [
        Problem("--checkpoint", str(one), f"must be a whole checkpoint: {flaw}", "give another one of the run")
        for one in checkpoints
        if (flaw := flaw_of(one))
    ]
    if config.rlhf is not None:
        problems.append(Problem("rlhf", "grpo", "answers of GRPO runs are not scored as objects", "score its rewards"))
    if not config.custom.val_jsonl:
        problems.append(Problem("custom.val_jsonl", None, "must name the records to answer", "name a data file"))
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        problems.append(Problem("WORLD_SIZE", os.environ["WORLD_SIZE"], "one process evaluates", "leave torchrun out"))
    if problems:
        raise ConfigError(problems)


def _for_evaluation(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run that only evaluates, and leaves nothing behind."""
    told = {"output_dir": str(folder), "report_to": [], "eval_strategy": "steps", "trace": False}
    training = config.training.model_copy(update=told)
    return config.model_copy(update={"training": training, "deepspeed": None})
