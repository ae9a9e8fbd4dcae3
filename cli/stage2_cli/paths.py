"""Paths of a job's containers, and the local files behind them.

The process executor starts the same containers as the controller; only their paths differ. The longest matching prefix
wins; a path without one stays unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem, refused
from stage2_api.job import RolloutMatchingJob
from stage2_api.kubernetes_types import Volume


@dataclass(frozen=True)
class PathMap:
    """Prefixes of container paths, and the local folder or file of each."""

    prefixes: Mapping[str, Path]

    def local(self, text: str) -> str:
        """Return a mapped container path as a local path; any other string unchanged."""
        matching = [prefix for prefix in self.prefixes if text == prefix or text.startswith(prefix + "/")]
        if not matching:
            return text
        prefix = max(matching, key=len)
        return str(self.prefixes[prefix]) + text[len(prefix) :]

    def localise(self, value: Any) -> Any:
        """Return the same for every string inside mappings and lists, such as a training configuration."""
        if isinstance(value, str):
            return self.local(value)
        if isinstance(value, Mapping):
            return {key: self.localise(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.localise(item) for item in value]
        return value


def host_paths(job: RolloutMatchingJob) -> dict[str, Path]:
    """Return the folder or file of each hostPath volume, by mount path."""
    return {
        volume.mount_path: Path(volume.host_path.path) / (volume.sub_path or "")
        for volume in job.spec.volumes
        if volume.host_path is not None
    }


def local_path(job: RolloutMatchingJob, mapped: Mapping[str, Path], path: Path) -> Path | None:
    """Return the local path of a container path; None inside a volume that is not on this machine."""
    prefixes = {**host_paths(job), **mapped}
    volumes = {volume.mount_path for volume in job.spec.volumes}
    matching = [prefix for prefix in volumes | set(prefixes) if path.is_relative_to(prefix)]
    if matching and max(matching, key=len) not in prefixes:
        return None
    return Path(PathMap(prefixes).local(str(path)))


def parse_mappings(mapped: Sequence[str]) -> dict[str, Path]:
    """Parse `CONTAINER=LOCAL` options into prefixes. Raises ConfigError for a relative or malformed one."""
    prefixes: dict[str, Path] = {}
    for text in mapped:
        container, sign, local = text.partition("=")
        if not sign or not local or not container.startswith("/"):
            rule = "must read CONTAINER=LOCAL with an absolute path of the containers"
            raise refused("--map", text, rule, "write for example --map /data=out/shapes")
        prefixes[container.rstrip("/") or "/"] = Path(local).resolve()
    return prefixes


def volume_paths(job: RolloutMatchingJob, folder: Path, mapped: Mapping[str, Path]) -> dict[str, Path]:
    """Return the local folder of every volume, by mount path, and create those of emptyDir volumes inside `folder`.

    Raises ConfigError for a volume that is not on this machine.
    """
    found = {path: local for path, local in host_paths(job).items() if path not in mapped}
    problems: list[Problem] = []
    for index, volume in enumerate(job.spec.volumes):
        problems += _missing(volume, found.get(volume.mount_path), f"spec.volumes[{index}].hostPath.path")
        if volume.mount_path in mapped or volume.mount_path in found:
            continue
        if volume.empty_dir is not None:
            found[volume.mount_path] = folder / volume.name
            found[volume.mount_path].mkdir(parents=True, exist_ok=True)
        else:
            rule = "only hostPath and emptyDir volumes are on this machine"
            way_out = f"name its folder: --map {volume.mount_path}=FOLDER"
            problems.append(Problem(f"spec.volumes[{index}]", volume.name, rule, way_out))
    if problems:
        raise ConfigError(problems)
    return found


def _missing(volume: Volume, local: Path | None, path: str) -> list[Problem]:
    """Return a problem where a hostPath volume's type requires a folder or file that does not exist."""
    kind = volume.host_path.type if volume.host_path is not None else ""
    is_there = {"Directory": Path.is_dir, "File": Path.is_file}
    if local is None or kind not in is_there or is_there[kind](local):
        return []
    way_out = f"create it, or choose another one: --map {volume.mount_path}=PATH"
    return [Problem(path, str(local), f"type: {kind} requires one, and there is none on this machine", way_out)]
