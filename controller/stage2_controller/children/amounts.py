"""The amounts that a pod asks for: what no API server takes, and what leaves a process too little memory. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from stage2_api.errors import Problem
from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import layout
from stage2_controller.job import names
from stage2_controller.job.objects import parse_quantity, pod_requests, show_quantity, value_at

_AMOUNT = "must be an amount, such as 2, 500m or 64Gi"
_OF_GPUS = "use spec.rollout.gpusPerServer or spec.learner.gpus"
_PLAIN_NAMES = ("cpu", "memory", "ephemeral-storage")
_PLAIN_NAMES_OF_POD = ("cpu", "memory")
_HUGE_PAGES = "hugepages-"


def containers_of(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each container of a pod with the key of its list."""
    for key in ("containers", "initContainers"):
        for container in pod["spec"].get(key) or ():
            yield key, container


def amount_problems(job: RolloutMatchingJob, role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the amounts of a role's pod; a mistake of the role, once for all of its containers."""
    spec = job.spec.rollout if role == names.ROLE_ROLLOUT else job.spec.learner
    written = spec.resources.model_dump(mode="json", by_alias=True, exclude_none=True) if spec.resources else {}
    path = f"spec.{role}.resources"
    of_role = [*_problems(path, written), *_counted_problems(path, written, job.spec.gpu_resource)]
    if job.spec.gpu_resource:
        of_role += _memory_problems(path, written)
    yield from of_role
    seen = {(problem.path.removeprefix(path), problem.value) for problem in of_role}
    for path, problem in _of_template(job, role, pod):
        if (problem.path.removeprefix(path), problem.value) not in seen:
            yield problem
    yield from _size_problems(role, pod)


def _of_template(job: RolloutMatchingJob, role: str, pod: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    """Yield the problems of the containers, and of the pod as a whole, each with the path of its resources."""
    root = f"spec.{role}.template.spec"
    for key, container in containers_of(pod):
        path, resources = f"{root}.{key}[{container['name']}].resources", container.get("resources") or {}
        found = list(_problems(path, resources))
        if job.spec.gpu_resource and key == "containers" and is_own(container):
            found += _memory_problems(path, resources)
        yield from ((path, problem) for problem in found)
    path, of_pod = f"{root}.resources", pod["spec"].get("resources") or {}
    found = [*_problems(path, of_pod, plain=_PLAIN_NAMES_OF_POD), *_sum_problems(path, of_pod, pod)]
    if job.spec.gpu_resource:
        found += _memory_problems(path, of_pod)
    yield from ((path, problem) for problem in found)


def is_own(container: Mapping[str, Any]) -> bool:
    """Return whether a container of the pod is a server or the learner."""
    name = str(container["name"])
    return name == names.ROLE_LEARNER or name.startswith("server-")


def _problems(path: str, resources: Mapping[str, Any], *, plain: tuple[str, ...] = _PLAIN_NAMES) -> Iterator[Problem]:
    """Yield what is wrong with resources by themselves. plain: names that need no domain."""
    requests, limits = _parts(resources)
    for part, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            yield from _name_problems(f"{path}.{part}[{name}]", name, amount, plain)
            yield from _amount_problem(f"{path}.{part}[{name}]", name, amount)
    for name, requested in requests.items():
        yield from _limit_problems(f"{path}.limits[{name}]", name, requested, limits.get(name))


def _parts(resources: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    requests, limits = (value_at(resources, key) for key in ("requests", "limits"))
    return (requests if isinstance(requests, Mapping) else {}), (limits if isinstance(limits, Mapping) else {})


def _name_problems(path: str, name: str, amount: Any, plain: tuple[str, ...]) -> Iterator[Problem]:
    of_container = plain == _PLAIN_NAMES
    if name in plain or name.startswith(_HUGE_PAGES) or (of_container and "/" in name):
        return
    others = f" and {_HUGE_PAGES}SIZE" + (", or DOMAIN/NAME of a device" if of_container else "")
    way_out = _OF_GPUS if name in ("gpu", "gpus") else "correct the name, or remove it"
    yield Problem(path, amount, f"there is no resource {name} here: the names are {', '.join(plain)}{others}", way_out)


def _amount_problem(path: str, name: str, amount: Any) -> Iterator[Problem]:
    number = parse_quantity(amount)
    if number is None or number < 0:
        yield Problem(path, amount, _AMOUNT, "change it")
    elif "/" in name and number % 1:
        yield Problem(path, amount, "must be a whole number of pieces", "change it")


def _limit_problems(path: str, name: str, requested: Any, limit: Any) -> Iterator[Problem]:
    least, most = parse_quantity(requested), parse_quantity(limit)
    if least is None or (most is None and limit is not None):
        return
    if "/" in name and least != most:
        rule = f"must equal its request, {requested}: pieces of {name} are not shared"
        yield Problem(path, limit, rule, "set both to the same number, or only the limit")
    elif most is not None and most < least:
        yield Problem(
            path, limit, f"must be at least its request, {requested}", "raise the limit, or lower the request"
        )


def _counted_problems(path: str, resources: Mapping[str, Any], gpu: str) -> Iterator[Problem]:
    """Refuse GPUs among the amounts of a role, because the job's own number replaces theirs."""
    for part, amounts in zip(("requests", "limits"), _parts(resources), strict=True):
        if gpu and gpu in amounts:
            yield Problem(f"{path}.{part}[{gpu}]", amounts[gpu], "GPUs are counted by the job", _OF_GPUS)


def _memory_problems(path: str, resources: Mapping[str, Any]) -> Iterator[Problem]:
    limit = _parts(resources)[1].get("memory")
    most = parse_quantity(limit)
    if most is not None and most < layout.SHARED_MEMORY_BYTES:
        rule = f"{layout.SHARED_MEMORY_FOLDER} is part of it, where workers of vLLM and NCCL need 1Gi"
        yield Problem(f"{path}.limits[memory]", limit, rule, "raise the limit, or remove it")


def _sum_problems(path: str, of_pod: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse amounts of a pod as a whole that are less than those of its containers."""
    requests, limits = _parts(of_pod)
    needed = pod_requests({**pod["spec"], "resources": {}, "overhead": {}})
    for part, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            room = parse_quantity(amount)
            if room is not None and room < needed.get(name, 0):
                rule = f"its containers request {show_quantity(name, needed[name])} together"
                yield Problem(f"{path}.{part}[{name}]", amount, rule, "raise it, or lower theirs")
    for _, container in containers_of(pod):
        for name, limit in _parts(container.get("resources") or {})[1].items():
            most, room = parse_quantity(limit), parse_quantity(limits.get(name))
            if most is not None and room is not None and most > room:
                rule = f"must be at least the limit of {container['name']}, {limit}"
                yield Problem(f"{path}.limits[{name}]", limits[name], rule, "raise it, or lower that one")


def _size_problems(role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse sizes of volumes that are no amounts."""
    for volume in pod["spec"]["volumes"]:
        path = f"spec.{role}.template.spec.volumes[{volume['name']}]"
        limit = value_at(volume, "emptyDir", "sizeLimit")
        if limit is not None:
            yield from _amount_problem(f"{path}.emptyDir.sizeLimit", "memory", limit)
        where = f"{path}.ephemeral.volumeClaimTemplate.spec.resources"
        for part, amounts in zip(
            ("requests", "limits"),
            _parts(value_at(volume, "ephemeral", "volumeClaimTemplate", "spec", "resources") or {}),
            strict=True,
        ):
            for name, amount in amounts.items():
                yield from _amount_problem(f"{where}.{part}[{name}]", name, amount)
