"""What the pods of a job would find, without a cluster: where they write and read, and what no node would start.

`examined` builds the pods, templates of the job included, and looks at what their containers have. A path in no volume
is a mistake where stage2's own image runs; another image may have it, so that is only said.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from stage2_api.errors import Problem
from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import layout
from stage2_api.runconfig import FOLDER, HUB_NAME
from stage2_controller.children.build import pod_templates
from stage2_controller.spec import names, template_rules
from stage2_controller.spec.objects import parse_quantity, value_at
from stage2_controller.spec.settings import DEFAULT_IMAGE

Pods = Mapping[str, Mapping[str, Any]]

_IN_OUR_IMAGE = "/opt/stage2"
_FILES_OF_OTHERS = ("configMap", "secret", "projected", "downwardAPI")  # the kubelet mounts them read-only
_NEW = ("emptyDir", "ephemeral")
_AMOUNT = "must be an amount, such as 2, 500m or 64Gi"
_NO_VOLUME = "lies in no volume of the job"


@dataclass
class Examination:
    """What was found. in_image: keys and paths that only the job's image can have."""

    problems: list[Problem] = field(default_factory=list)
    in_image: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """Where a path lies in a container: the innermost volume above it, and why that cannot be written."""

    volume: str
    mount_path: str
    is_new: bool
    read_only: bool


def examined(job: RolloutMatchingJob) -> Examination:
    """Return what would keep the pods of a valid job from their work."""
    pods = pod_templates(job)
    found = Examination()
    for role, pod in pods.items():
        found.problems += _resource_problems(job, role, pod)
        found.problems += _size_problems(role, pod)
        found.problems += _mount_problems(role, pod)
        found.problems += _name_problems(job, role, pod)
    learner = _container(pods, names.ROLE_LEARNER)
    for key, path in _written(job):
        found.problems += _write_problems(f"spec.config.{key}", path, pods[names.ROLE_LEARNER], learner)
    for key, path in _read(job):
        _examine_read(found, job, pods, key, path)
    return found


def _written(job: RolloutMatchingJob) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of folders that the learner writes."""
    config = job.spec.config
    yield "training.output_dir", config.training.output_dir
    dump = config.rollout_matching.monitor_dump
    if dump.enabled and dump.out_dir is not None:
        yield "custom.extra.rollout_matching.monitor_dump.out_dir", dump.out_dir


def _read(job: RolloutMatchingJob) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of files and folders that a run reads; a model's name on a hub is none."""
    config = job.spec.config
    if not HUB_NAME.fullmatch(config.model.model):
        yield "model.model", config.model.model
    yield "custom.train_jsonl", config.custom.train_jsonl
    if config.custom.val_jsonl is not None:
        yield "custom.val_jsonl", config.custom.val_jsonl
    for index, root in enumerate(config.custom.image_roots):
        yield f"custom.image_roots[{index}]", root
    if config.training.resume_from_checkpoint is not None:
        yield "training.resume_from_checkpoint", config.training.resume_from_checkpoint
    monitor = config.rollout_matching.desc_monitor
    if monitor.enabled and monitor.mode != "exact" and FOLDER.fullmatch(monitor.semantic_model):
        yield "custom.extra.rollout_matching.desc_monitor.semantic_model", monitor.semantic_model


def _write_problems(key: str, path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[Problem]:
    way_out = "choose a folder below the mountPath of a volume that the learner can write, or add one to spec.volumes"
    place = _place(path, pod, container)
    if place is None:
        if value_at(container, "securityContext", "readOnlyRootFilesystem") is not False:
            rule = f"{_NO_VOLUME}, and the rest of the learner's container is read-only"
            yield Problem(key, path, rule, way_out)
    elif place.read_only:
        yield Problem(key, path, f"the volume {place.volume} at {place.mount_path} is read-only", way_out)
    elif place.mount_path == layout.SHARED_MEMORY_FOLDER:
        rule = f"{layout.SHARED_MEMORY_FOLDER} is memory of the pod: it counts against its limit, and goes with the pod"
        yield Problem(key, path, rule, way_out)


def _examine_read(found: Examination, job: RolloutMatchingJob, pods: Pods, key: str, path: str) -> None:
    """Look for a path in the learner's container; servers have the volumes of the job too."""
    container = _container(pods, names.ROLE_LEARNER)
    place = _place(path, pods[names.ROLE_LEARNER], container)
    where = f"spec.config.{key}"
    way_out = "choose a path below the mountPath of a volume that has it, or add one to spec.volumes"
    if place is not None:
        if place.is_new and not template_rules.adds_containers(job):
            rule = f"the volume {place.volume} at {place.mount_path} is empty when the pod starts"
            found.problems.append(Problem(where, path, rule, way_out))
    elif container["image"] != DEFAULT_IMAGE:
        found.in_image.append((key, path))
    elif not PurePosixPath(layout.cleaned(path)).is_relative_to(_IN_OUR_IMAGE):
        rule = f"{_NO_VOLUME}, and stage2's image does not have it"
        found.problems.append(Problem(where, path, rule, f"{way_out}, or name the image that has it: spec.image"))


def _place(path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> _Place | None:
    """Return where a path lies; None: in no volume. A relative one begins where stage2's image starts processes."""
    whole = layout.cleaned(str(PurePosixPath(container.get("workingDir") or layout.TMP_FOLDER) / path))
    above = [
        mount
        for mount in container.get("volumeMounts") or ()
        if PurePosixPath(whole).is_relative_to(layout.cleaned(mount["mountPath"]))
    ]
    if not above:
        return None
    mount = max(above, key=lambda one: len(layout.cleaned(one["mountPath"])))
    named = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount.get("name")]
    volume = named[0] if named else {}
    read_only = bool(
        mount.get("readOnly")
        or volume.keys() & set(_FILES_OF_OTHERS)
        or any(value_at(volume, source, "readOnly") for source in ("persistentVolumeClaim", "nfs"))
    )
    return _Place(str(mount.get("name")), mount["mountPath"], bool(volume.keys() & set(_NEW)), read_only)


def _container(pods: Pods, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in pods[name]["spec"]["containers"] if one["name"] == name)
    return found


def _containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("containers", "initContainers"):
        for container in pod["spec"].get(key) or ():
            yield key, container


def _name_problems(job: RolloutMatchingJob, role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse what a template adds without an image, which is most often a misspelt name of stage2's own."""
    template = (job.spec.rollout if role == names.ROLE_ROLLOUT else job.spec.learner).template
    for key in ("containers", "initContainers"):
        complete = [one["name"] for one in pod["spec"].get(key) or () if one.get("image")]
        own = ["server", *complete] if role == names.ROLE_ROLLOUT and key == "containers" else complete
        for index, container in enumerate(value_at(template, "spec", key) or ()):
            if container["name"] not in own:
                path = f"spec.{role}.template.spec.{key}[{index}].image"
                rule = f"{container['name']} is no container of stage2's here ({', '.join(own)}), and has no image"
                yield Problem(path, container.get("image"), rule, "correct the name, or give the container an image")


def _mount_problems(role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    present = [volume["name"] for volume in pod["spec"]["volumes"]]
    for key, container in _containers(pod):
        for mount in container.get("volumeMounts") or ():
            if mount.get("name") not in present:
                path = f"spec.{role}.template.spec.{key}[{container['name']}].volumeMounts[{mount['mountPath']}].name"
                yield Problem(
                    path, mount.get("name"), f"no volume of the pod has this name: {', '.join(present)}", "correct it"
                )


def _resource_problems(job: RolloutMatchingJob, role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse amounts that the API server refuses, once for all servers, and a limit that /dev/shm has no room in."""
    spec = job.spec.rollout if role == names.ROLE_ROLLOUT else job.spec.learner
    written = spec.resources.model_dump(mode="json", by_alias=True, exclude_none=True) if spec.resources else {}
    of_role = list(_amount_problems(f"spec.{role}.resources", written))
    if job.spec.gpu_resource:
        of_role += _memory_problems(f"spec.{role}.resources", written)
    yield from of_role
    seen = {(problem.path.removeprefix(f"spec.{role}.resources"), problem.value) for problem in of_role}
    for key, container in _containers(pod):
        path = f"spec.{role}.template.spec.{key}[{container['name']}].resources"
        for problem in _amount_problems(path, container.get("resources") or {}):
            if (problem.path.removeprefix(path), problem.value) not in seen:
                yield problem


def _size_problems(role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse sizes of volumes that are no amounts."""
    for volume in pod["spec"]["volumes"]:
        path = f"spec.{role}.template.spec.volumes[{volume['name']}]"
        limit = value_at(volume, "emptyDir", "sizeLimit")
        if limit is not None and not _is_amount(limit):
            yield Problem(f"{path}.emptyDir.sizeLimit", limit, _AMOUNT, "change it")
        new = value_at(volume, "ephemeral", "volumeClaimTemplate", "spec", "resources")
        where = f"{path}.ephemeral.volumeClaimTemplate.spec.resources"
        yield from _amount_problems(where, new if isinstance(new, Mapping) else {})


def _is_amount(value: Any) -> bool:
    number = parse_quantity(value)
    return number is not None and number >= 0


def _amount_problems(path: str, resources: Mapping[str, Any]) -> Iterator[Problem]:
    requests, limits = (resources.get(key) or {} for key in ("requests", "limits"))
    for part, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            if not _is_amount(amount):
                yield Problem(f"{path}.{part}[{name}]", amount, _AMOUNT, "change it")
            elif "/" in name and (parse_quantity(amount) or 0) % 1:
                yield Problem(f"{path}.{part}[{name}]", amount, "must be a whole number of pieces", "change it")
    for name, requested in requests.items():
        yield from _limit_problems(f"{path}.limits[{name}]", name, requested, limits.get(name))


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


def _memory_problems(path: str, resources: Mapping[str, Any]) -> Iterable[Problem]:
    limit = value_at(resources, "limits", "memory")
    most = parse_quantity(limit)
    if most is not None and most < layout.SHARED_MEMORY_BYTES:
        rule = f"{layout.SHARED_MEMORY_FOLDER} is part of it, where workers of vLLM and NCCL need 1Gi"
        yield Problem(f"{path}.limits[memory]", limit, rule, "raise the limit, or remove it")
