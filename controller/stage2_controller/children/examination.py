"""What the pods of a job would find, without a cluster: where they write and read, and what no node would start.

`examined` builds the pods, templates of the job included, and looks at what their containers have. A path in no volume
is a mistake where stage2's own image runs; another image may have it, so that is only reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from stage2_api.errors import Problem
from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import layout
from stage2_api.runconfig import HUB_NAME
from stage2_controller.children.amounts import amount_problems, containers_of, is_own
from stage2_controller.children.build import pod_templates
from stage2_controller.job import names, template_rules
from stage2_controller.job.objects import value_at
from stage2_controller.job.output_folder import whole_path
from stage2_controller.job.settings import DEFAULT_IMAGE

Pods = Mapping[str, Mapping[str, Any]]

_IN_OUR_IMAGE = "/opt/stage2"
_FILES_OF_OTHERS = ("configMap", "secret", "projected", "downwardAPI")  # the kubelet mounts them read-only
_NEW = ("emptyDir", "ephemeral")
_NO_VOLUME = "lies in no volume of the job"
_IN_IMAGE = "in the image"


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
        found.problems += amount_problems(job, role, pod)
        found.problems += _mount_problems(role, pod)
        found.problems += _shared_path_problems(job, role, pod)
        found.problems += _name_problems(job, role, pod)
    learner = _container(pods, names.ROLE_LEARNER)
    for key, path in _written(job):
        found.problems += _write_problems(f"spec.config.{key}", path, pods[names.ROLE_LEARNER], learner)
    for key, path in _read(job):
        _examine_read(found, job, pods, key, path)
    return found


def _written(job: RolloutMatchingJob) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of folders that the learner writes."""
    yield "training.output_dir", job.spec.config.training.output_dir


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
    """Look for a path in the learner's container, and for the model in those of the servers too.

    They have the volumes of the job in common, so that only a template makes a difference.
    """
    readers = [(names.ROLE_LEARNER, _container(pods, names.ROLE_LEARNER))]
    if key == "model.model" and names.ROLE_ROLLOUT in pods:
        containers = pods[names.ROLE_ROLLOUT]["spec"]["containers"]
        readers += [(names.ROLE_ROLLOUT, one) for one in containers if is_own(one)]
    for role, container in readers:
        rule = _unreadable(job, path, pods[role], container)
        if rule == _IN_IMAGE:
            found.in_image.append((key, path))
            return
        if rule is not None:
            way_out = "choose a path below the mountPath of a volume that has it, or add one to spec.volumes"
            if rule.startswith(_NO_VOLUME):
                way_out += ", or name the image that has it: spec.image"
            of = f" ({container['name']} loads it too)" if role == names.ROLE_ROLLOUT else ""
            found.problems.append(Problem(f"spec.config.{key}", path, f"{rule}{of}", way_out))
            return


def _unreadable(job: RolloutMatchingJob, path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> str | None:
    """Return why a container cannot have a path; None where it may, and _IN_IMAGE where only its image can know."""
    place = _place(path, pod, container)
    if place is not None:
        if not place.is_new or template_rules.adds_containers(job):
            return None
        return f"the volume {place.volume} at {place.mount_path} is empty when the pod starts"
    if container.get("image") != DEFAULT_IMAGE:
        return _IN_IMAGE
    if PurePosixPath(layout.cleaned(path)).is_relative_to(_IN_OUR_IMAGE):
        return None
    return f"{_NO_VOLUME}, and stage2's image does not have it"


def _place(path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> _Place | None:
    """Return where a path lies; None: in no volume."""
    whole = whole_path(path, container)
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


def _shared_path_problems(job: RolloutMatchingJob, role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse a path that one container mounts twice: no API server takes the same text, and else one hides the other.

    A mount of a template replaces stage2's own at the same path, written alike; two of the template's do not.
    """
    template = (job.spec.rollout if role == names.ROLE_ROLLOUT else job.spec.learner).template
    written = [
        (key, one)
        for key in ("containers", "initContainers")
        for one in value_at(template, "spec", key) or ()
        if _twice(one)
    ]
    known = {(key, one["name"]) for key, one in written}
    built = [(key, one) for key, one in containers_of(pod) if (key, one["name"]) not in known and _twice(one)]
    for key, container in [*written, *built]:
        first, again = _twice(container)
        path = f"spec.{role}.template.spec.{key}[{container['name']}].volumeMounts[{again['mountPath']}].mountPath"
        rule = f"the container mounts {first.get('name')} there too"
        yield Problem(path, again["mountPath"], rule, "choose another path, or remove one of the two")


def _twice(container: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the first two mounts of a container at one path; empty where each has a path of its own."""
    seen: dict[str, Mapping[str, Any]] = {}
    for mount in container.get("volumeMounts") or ():
        path = layout.cleaned(mount["mountPath"])
        if path in seen:
            return seen[path], mount
        seen[path] = mount
    return ()


def _mount_problems(role: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    present = [volume["name"] for volume in pod["spec"]["volumes"]]
    for key, container in containers_of(pod):
        for mount in container.get("volumeMounts") or ():
            if mount.get("name") not in present:
                path = f"spec.{role}.template.spec.{key}[{container['name']}].volumeMounts[{mount['mountPath']}].name"
                yield Problem(
                    path, mount.get("name"), f"no volume of the pod has this name: {', '.join(present)}", "correct it"
                )
