"""`stage2 inspect CONFIG --rewards`: the score that each reward of a GRPO run gives one answer."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stage2_api.errors import ConfigError, Problem
from stage2_cli.config_files import load_config
from stage2_cli.inspect_sample import read_text
from stage2_trainer.data.records import load_record
from stage2_trainer.grpo.rewards import Reward, Sample, Scores, load_rewards, score
from stage2_trainer.grpo.task import Task, record_rules


def inspect_rewards(config: Path | None, *, sample: int | None, answer: Path | None, as_json: bool) -> int:
    """Print the rewards of an answer to a training record, and their weighted sum; return 0. Raises ConfigError."""
    run = load_config(_required(config, "CONFIG"))
    if run.rlhf is None:
        raise ConfigError([Problem("rlhf", None, "only GRPO runs have rewards", "give the configuration of one")])
    task = Task.from_config(run)
    custom, number = run.custom, sample or 0
    record = load_record(
        custom.train_jsonl,
        number,
        limit=custom.train_sample_limit,
        rules=record_rules(run).without_images(),
        named="--sample",
    )
    rewards = load_rewards(run.rlhf.reward_funcs, run.rlhf.resolved_weights)
    text = read_text(_required(answer, "--response-file"), "--response-file")
    scores = score(rewards, Sample(text, record.metadata, task.contract))
    if as_json:
        print(json.dumps({"sample": number, "rewards": dict(scores.by_name), "total": scores.total}))
    else:
        Console().print(table(rewards, scores))
    return 0


def table(rewards: list[Reward], scores: Scores) -> Table:
    """Return the rewards of one answer: score, weight, and weighted score."""
    shown = Table("reward", "score", "weight", "adds")
    for reward in rewards:
        value = scores.by_name[reward.name]
        shown.add_row(reward.name, f"{value:.3f}", f"{reward.weight:g}", f"{reward.weight * value:.3f}")
    shown.add_section()
    shown.add_row("total", "", "", f"{scores.total:.3f}")
    return shown


def _required(path: Path | None, name: str) -> Path:
    if path is None:
        way_out = "write `stage2 inspect CONFIG --rewards --sample N --response-file FILE`"
        raise ConfigError([Problem(name, None, "is needed with --rewards", way_out)])
    return path
