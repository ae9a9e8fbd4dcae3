"""Where a job's output folder lies: on a volume that outlasts the learner's pod, or on one that ends with it. Pure."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from stage2_api.errors import Problem
from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import layout
from stage2_controller.job import names
from stage2_controller.job.objects import value_at

_ENDS_WITH_POD = ("emptyDir", "ephemeral")
_OWN = {layout.TMP_FOLDER: layout.TMP_VOLUME, layout.SHARED_MEMORY_FOLDER: layout.SHARED_MEMORY_VOLUME}
_PATH = "training.output_dir"
WAY_OUT = "choose a folder in a volume with a persistentVolumeClaim"


def fleeting(job: RolloutMatchingJob) -> str | None:
    """Return where the output folder is if it ends with the learner's pod; None if it lasts."""
    folder = job.spec.config.training.output_dir
    learner = next(iter(_written_learner(job)), {})
    volume = _volume_of(whole_path(folder, learner), dict(_mounts(job)))
    if volume is None:
        return f"{_PATH} {folder} is in no volume, so it ends with its pod"
    sources = {one["name"]: one for one in _volumes(job)}
    kind = next((kind for kind in _ENDS_WITH_POD if kind in sources.get(volume, {})), None)
    return f"{_PATH} {folder} is in volume {volume} ({kind}), which ends with its pod" if kind else None


def whole_path(path: str, container: Mapping[str, Any]) -> str:
    """Return a path of a container as its runtime resolves it.

    A relative one begins in the container's workingDir, else where stage2's image starts its processes.
    """
    return layout.cleaned(posixpath.join(str(container.get("workingDir") or layout.TMP_FOLDER), path))


def warnings(job: RolloutMatchingJob) -> tuple[Problem, ...]:
    """Return the warning that a job's checkpoints end with its pod; none where they last."""
    if fleeting(job) is None:
        return ()
    rule = (
        "the folder ends with the learner's pod: a job that is suspended, moved, evicted or renewed starts again at"
        " step 0, and once it has ended there is no model"
    )
    return (Problem(f"spec.config.{_PATH}", job.spec.config.training.output_dir, rule, WAY_OUT),)


def _volume_of(folder: str, mounts: Mapping[str, str]) -> str | None:
    """Return the volume that is mounted at the folder, or nearest above it."""
    above = [path for path in mounts if path == folder or folder.startswith(f"{path.rstrip('/')}/")]
    return mounts[max(above, key=len)] if above else None


def _mounts(job: RolloutMatchingJob) -> Iterator[tuple[str, str]]:
    """Yield path and volume of each mount of the learner's container; a later one replaces an earlier one."""
    yield from _OWN.items()
    for volume in job.spec.volumes:
        yield layout.cleaned(volume.mount_path), volume.name
    for container in _written_learner(job):
        for mount in container.get("volumeMounts") or ():
            yield layout.cleaned(str(mount.get("mountPath"))), str(mount.get("name"))


def _written_learner(job: RolloutMatchingJob) -> list[Mapping[str, Any]]:
    """Return what the template says of the learner's container, if anything."""
    return [one for one in _listed(job.spec.learner.template, "containers") if one["name"] == names.ROLE_LEARNER]


def _volumes(job: RolloutMatchingJob) -> Iterator[Mapping[str, Any]]:
    """Yield each volume with its source."""
    yield from ({"name": name, "emptyDir": {}} for name in _OWN.values())
    yield from ({"name": volume.name, **volume.source} for volume in job.spec.volumes)
    yield from _listed(job.spec.learner.template, "volumes")


def _listed(template: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = value_at(template, "spec", key)
    return [one for one in found if isinstance(one, Mapping) and "name" in one] if isinstance(found, list) else []
