"""Paths of a job's containers, and where they lie on this machine.

The process executor starts the very containers of the plan; only their paths differ. A mapping is a list of prefixes;
the longest one that fits wins, and a path that none fits stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.job import RolloutMatchingJob


@dataclass(frozen=True)
class PathMap:
    """Container path prefixes and the local folders or files that stand for them."""

    prefixes: Mapping[str, Path]

    def local(self, text: str) -> str:
        """A string with a mapped container path replaced; any other string unchanged."""
        fitting = [prefix for prefix in self.prefixes if text == prefix or text.startswith(prefix + "/")]
        if not fitting:
            return text
        prefix = max(fitting, key=len)
        return str(self.prefixes[prefix]) + text[len(prefix) :]

    def localise(self, value: Any) -> Any:
        """The same for every string inside mappings and lists (a training configuration, say)."""
        if isinstance(value, str):
            return self.local(value)
        if isinstance(value, Mapping):
            return {key: self.localise(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.localise(item) for item in value]
        return value


def host_paths(job: RolloutMatchingJob) -> dict[str, Path]:
    """The mount paths of a job's hostPath volumes, and the folder or file of this machine behind each."""
    return {
        volume.mount_path: Path(volume.host_path.path) / (volume.sub_path or "")
        for volume in job.spec.volumes
        if volume.host_path is not None
    }


def place_here(job: RolloutMatchingJob, mapped: Mapping[str, Path], path: Path) -> Path | None:
    """Return where a path of a job's containers lies on this machine; None inside a volume that is not on it."""
    here = {**host_paths(job), **mapped}
    volumes = {volume.mount_path for volume in job.spec.volumes}
    fitting = [prefix for prefix in volumes | set(here) if path.is_relative_to(prefix)]
    if fitting and max(fitting, key=len) not in here:
        return None
    return Path(PathMap(here).local(str(path)))


def parse_mappings(mapped: Sequence[str]) -> dict[str, Path]:
    """`CONTAINER=LOCAL` options as prefixes; ConfigError for one that is not, or whose container path is relative."""
    prefixes: dict[str, Path] = {}
    for text in mapped:
        container, sign, local = text.partition("=")
        if not sign or not local or not container.startswith("/"):
            rule = "must read CONTAINER=LOCAL with an absolute path of the containers"
            raise ConfigError([Problem("--map", text, rule, "write for example --map /data=out/shapes")])
        prefixes[container.rstrip("/") or "/"] = Path(local).resolve()
    return prefixes
