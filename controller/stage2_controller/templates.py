"""What a person's pod template may not change: a job whose contract is broken would fail later and less clearly."""

from collections.abc import Iterator, Mapping
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.job import RolloutMatchingJob
from stage2_controller import names

_OF_CONTAINER = {
    "command": "stage2 starts its own commands",
    "args": "stage2 starts its own commands",
    "ports": "servers and learner reach each other on stage2's ports",
}
_OF_POD = {
    "restartPolicy": "Deployment and Job each need their own",
    "affinity": "the learner follows the servers",
    "automountServiceAccountToken": "pods hold no API credentials",
}
_WAY_OUT = {"affinity": "use spec.placement", "ports": "use spec.rollout.port"}


def check(job: RolloutMatchingJob) -> None:
    """Raises ConfigError with every field of the two templates that belongs to stage2."""
    ours = {
        "rollout": {"server", *(f"server-{index}" for index in range(job.spec.rollout.servers))},
        "learner": {names.ROLE_LEARNER},
    }
    templates = {"rollout": job.spec.rollout.template, "learner": job.spec.learner.template}
    problems = [
        problem
        for role, template in templates.items()
        for problem in _problems(f"spec.{role}.template", template, ours[role])
    ]
    if problems:
        raise ConfigError(problems)


def _problems(path: str, template: Mapping[str, Any], ours: set[str]) -> Iterator[Problem]:
    for key in sorted(set(template) - {"metadata", "spec"}):
        yield Problem(f"{path}.{key}", template[key], "a pod template holds metadata and spec", "move it under spec")
    spec = template.get("spec") or {}
    if not isinstance(spec, Mapping):
        yield Problem(f"{path}.spec", spec, "must be a mapping", "write the fields of a pod under it")
        return
    yield from _reserved(f"{path}.spec", spec, _OF_POD)
    for index, container in enumerate(spec.get("containers") or []):
        where = f"{path}.spec.containers[{index}]"
        if not isinstance(container, Mapping) or not container.get("name"):
            way_out = f"name it {' or '.join(sorted(ours))} to change that container, otherwise to add one"
            yield Problem(where, container, "a container needs a name", way_out)
        elif container["name"] in ours:
            yield from _reserved(where, container, _OF_CONTAINER)


def _reserved(path: str, written: Mapping[str, Any], reserved: Mapping[str, str]) -> Iterator[Problem]:
    for key in sorted(reserved.keys() & written.keys()):
        yield Problem(f"{path}.{key}", written[key], reserved[key], _WAY_OUT.get(key, "remove it"))
