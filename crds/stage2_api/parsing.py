"""From a mapping, as YAML or an API server gives it, to a checked training configuration or job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage2_api.errors import ConfigError
from stage2_api.job import RolloutMatchingJob
from stage2_api.rules.grpo_batches import batch_problems
from stage2_api.rules.job import JOB_RULES
from stage2_api.rules.run import RUN_RULES
from stage2_api.rules.standalone import STANDALONE_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.validation.nesting import require_shallow
from stage2_api.validation.rule import Rule, lifted
from stage2_api.validation.size import require_small
from stage2_api.validation.validate import validate

_RULES: tuple[Rule[RolloutMatchingJob], ...] = (
    *lifted(JOB_RULES, "spec", lambda job: job.spec),
    *lifted(RUN_RULES, "spec.config", lambda job: job.spec.config),
)


def parse_run_config(raw: Mapping[str, Any], *, root: str = "") -> RunConfig:
    """Return the training configuration that `raw` describes.

    root: path of `raw` in its file, put before the paths of problems (`spec.config`).

    Raises:
        ConfigError: with every problem, not only the first.
    """
    require_shallow(raw, root=root)
    config = validate(RunConfig, raw, [*RUN_RULES, *STANDALONE_RULES], root=root)
    if config.rlhf is not None and (problems := batch_problems(config, 1, root=f"{root}." if root else "")):
        raise ConfigError(problems)
    return config


def parse_job(raw: Mapping[str, Any], *, bounded: bool = True) -> RolloutMatchingJob:
    """Return the job that an object of the API server or a file describes.

    bounded: whether it is held to the bounds of size.

    Raises:
        ConfigError: with every problem, not only the first.
    """
    require_shallow(raw)
    if bounded:
        require_small(raw)
    return validate(RolloutMatchingJob, raw, _RULES)
