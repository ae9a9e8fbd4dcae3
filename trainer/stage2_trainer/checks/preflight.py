"""Checks of batches, rewards and records before a run starts; they import nothing heavy."""

from __future__ import annotations

import difflib
from contextlib import suppress

from stage2_api.errors import ConfigError, Problem, refused
from stage2_api.rules.grpo_batches import batch_problems, round_problems
from stage2_api.runconfig import BEST_METRIC, RunConfig
from stage2_trainer.data.records import Record, RecordRules, units_by
from stage2_trainer.data.run_records import RunRecords, batch_sizes, load_run_records
from stage2_trainer.grpo import task
from stage2_trainer.grpo.loaded_rewards import Reward, load_rewards
from stage2_trainer.grpo.rewards import Sample
from stage2_trainer.telemetry.run_log import EVALUATION_KEYS


def record_rules(config: RunConfig) -> RecordRules:
    """Return how to read the records of a run, and the demands of its trainer on them."""
    if config.rlhf is not None:
        return task.record_rules(config)
    custom = config.custom
    return RecordRules(units=units_by(custom.coord_tokens.skip_bbox_norm), image_roots=tuple(custom.image_roots))


def checked_records(config: RunConfig, *, world_size: int) -> RunRecords:
    """Return the records of a run of so many learner processes.

    Raises ConfigError for broken lines, records that the processes cannot share evenly, and mistakes of a GRPO run,
    whose rewards score an answer each.
    """
    if config.rlhf is not None:
        _check_grpo(config, world_size)
        records = load_run_records(config, record_rules(config))
        if problems := round_problems(config, len(records.train), world_size):
            raise ConfigError(problems)
        try_rewards(config, records.train[0])
        return records
    _check_metric(config)
    records, training = load_run_records(config, record_rules(config)), config.training
    batch_sizes(
        len(records.train),
        training.per_device_train_batch_size,
        processes=config.readers(world_size),
        drop_last=training.dataloader_drop_last,
    )
    return records


def _check_metric(config: RunConfig) -> None:
    """Raise ConfigError for a metric of the best checkpoint that no evaluation has: the run would fail hours later."""
    metric = config.best_metric
    if metric is None or f"eval_{metric.removeprefix('eval_')}" in EVALUATION_KEYS:
        return
    near = difflib.get_close_matches(metric, EVALUATION_KEYS, n=1) or [BEST_METRIC]
    rule, way_out = "no evaluation has such a metric", f"did you mean {near[0]}? docs/log.md has all of them"
    raise refused("training.metric_for_best_model", metric, rule, way_out)


def _check_grpo(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError for batches that do not fit the processes, unsupported options and unknown rewards."""
    rlhf = config.rlhf
    assert rlhf is not None, "a GRPO run"
    problems = batch_problems(config, world_size)
    if rlhf.dynamic_sample:
        rule = "this version keeps every prompt, also where all of its answers score the same"
        problems.append(Problem("rlhf.dynamic_sample", True, rule, "set it to false"))
    if problems:
        raise ConfigError(problems)
    check_rewards(config)


def check_rewards(config: RunConfig, root: str = "", *, runs_files: bool = True) -> list[Reward]:
    """Return the rewards of a run, as `load_rewards` does. root: path of the configuration in its file.

    Raises ConfigError for rewards that no package here has, or that cannot be called.
    """
    rlhf = config.rlhf
    if rlhf is None:
        return []
    files = rlhf.reward_files or {}
    return load_rewards(rlhf.reward_funcs, rlhf.resolved_weights, root=root, files=files, runs_files=runs_files)


def try_rewards(config: RunConfig, record: Record, *, runs_files: bool = True) -> None:
    """Let each reward of a package or a file score the right answer to a record, and an empty one.

    A reward that fails there would end the run at its first step, after its servers and its model have been loaded.
    Raises ConfigError with all that fail.
    """
    added = [one for one in check_rewards(config, runs_files=runs_files) if one.source is not None]
    if not added:
        return
    asked = task.Task.from_config(config)
    answers = [""]
    with suppress(ConfigError):  # a summary without a reference
        answers.insert(0, asked.reference(record))
    problems: list[Problem] = []
    for reward in added:
        try:
            for answer in answers:
                reward(Sample(answer, record, asked.contract))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
