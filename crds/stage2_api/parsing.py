"""Parses files and objects into checked training configurations and jobs, and resolves `extends`.

Source of `extends`: semantics section 3. It is a path or a list of paths, relative to the file; later bases win.
Mappings merge key by key; anything else, including lists, is replaced. A base must be a YAML file in the folder of the
first file or below it, so that checking a stranger's configuration reveals nothing of other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, refused
from stage2_api.job import RolloutMatchingJob
from stage2_api.rules.grpo_batches import batch_problems
from stage2_api.rules.job import JOB_RULES
from stage2_api.rules.run import RUN_RULES, STANDALONE_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.validation.size import require_shallow, require_small
from stage2_api.validation.validate import Rule, lifted, validate

_RULES: tuple[Rule[RolloutMatchingJob], ...] = (
    *lifted(JOB_RULES, "spec", lambda job: job.spec),
    *lifted(RUN_RULES, "spec.config", lambda job: job.spec.config),
)


def parse_run_config(raw: Mapping[str, Any]) -> RunConfig:
    """Return the training configuration that `raw` describes.

    Raises:
        ConfigError: with every problem, not only the first.
    """
    require_shallow(raw)
    config = validate(RunConfig, raw, [*RUN_RULES, *STANDALONE_RULES])
    if config.rlhf is not None and (problems := batch_problems(config, 1)):
        raise ConfigError(problems)
    return config


def parse_job(raw: Mapping[str, Any]) -> RolloutMatchingJob:
    """Return the job that an object of the API server or a file describes.

    Raises:
        ConfigError: with every problem, not only the first.
    """
    require_shallow(raw)
    require_small(raw)
    return validate(RolloutMatchingJob, raw, _RULES)


Read = Callable[[Path], Mapping[str, Any]]
SUFFIXES = (".yaml", ".yml")


def resolve_extends(path: Path, read: Read) -> dict[str, Any]:
    """Return the mapping in the file `path` merged over those that it extends, without the key `extends`.

    read: parses a file into a mapping; this package does not know YAML.

    Raises:
        ConfigError: files extend each other in a circle or lie elsewhere, or `extends` is neither text nor a list of
            texts.
    """
    return _Resolver(path.resolve().parent, read).resolve(path, ())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `over` on top of `base`: mappings merge key by key, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


class _Resolver:
    """Resolves each file once, however many others build on it."""

    def __init__(self, folder: Path, read: Read) -> None:
        self._folder = folder
        self._read = read
        self._resolved: dict[Path, dict[str, Any]] = {}

    def resolve(self, path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
        """Return a file merged over its bases. above: the files that led to it, first to last."""
        here = path.resolve()
        if here in above:
            cycle = " → ".join(file.name for file in (*above[above.index(here) :], here))
            raise refused("extends", cycle, "files must not extend each other in a circle", "remove one")
        if here not in self._resolved:
            own = dict(self._read(path))
            result: dict[str, Any] = {}
            for base in _bases(own.pop("extends", [])):
                self._require_inside(path.parent / base, base)
                result = merged(result, self.resolve(path.parent / base, (*above, here)))
            self._resolved[here] = merged(result, own)
        return self._resolved[here]

    def _require_inside(self, path: Path, named: str) -> None:
        inside = path.resolve().is_relative_to(self._folder)
        if not inside or path.suffix not in SUFFIXES:
            rule = f"must be a YAML file ({' or '.join(SUFFIXES)}) in the folder of the first file, or below it"
            way_out = "keep files that build on each other in one folder, with the main file at its top"
            raise refused("extends", named, rule, way_out)


def _bases(extends: object) -> list[str]:
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        way_out = "write one path or a list of paths, relative to this file"
        raise refused("extends", extends, "must be a path or a list of paths", way_out)
    return bases
