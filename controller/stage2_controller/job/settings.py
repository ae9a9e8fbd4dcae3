"""The part of the controller's own configuration that shapes jobs: `Settings`, and the admin's policy in it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, TypeAdapter
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass as pydantic_dataclass

from stage2_api.errors import ConfigError, Problem
from stage2_api.job import JobSpec, LearnerSpec, RolloutMatchingJob, RolloutSpec
from stage2_api.pod import layout
from stage2_controller.job.objects import Amounts, value_at

_ANY: Final = "*"
_PLAIN = re.compile(r"(/[^/]+)+")  # as in the chart's policy.yaml
_TAG_OR_PATH = re.compile(r"([:@][^/]*|/.*)?")  # what may follow a repository, as in the chart's policy.yaml
_Folder = Annotated[str, AfterValidator(lambda written: written.rstrip("/"))]
_READ_ONLY = "this cluster lets jobs only read this folder of a node"
_NO_CODE = "this cluster lets jobs carry no files with rewards"
_PACKAGE = "put them into a package of the job's image, or ask the admin to set policy.rewardFiles of the chart"
_TO_WRITE = "set readOnly: true, or ask the admin to add the folder to policy.writableHostPaths of the chart"


@dataclass(frozen=True)
class _Kind:
    """A kind of thing that the policy lists. entries: the field of AdminPolicy."""

    words: str
    entries: str


_ACCOUNT = _Kind("service account", "service_accounts")
_ANNOTATION = _Kind("annotation of pods", "annotations")
_CLAIM = _Kind("claim", "claims")
_CLAIM_TEMPLATE = _Kind("ResourceClaimTemplate", "resource_claim_templates")
_CLASS = _Kind("runtime class", "runtime_classes")
_CONFIG_MAP = _Kind("ConfigMap", "config_maps")
_EXPORT = _Kind("NFS folder", "nfs")
_FOLDER = _Kind("folder of a node", "host_paths")
_GROUP = _Kind("group of pods", "groups")
_IMAGE = _Kind("image registry", "image_registries")
_LABEL = _Kind("label of pods", "labels")
_PULL_SECRET = _Kind("Secret of a registry", "pull_secrets")
_SECRET = _Kind("Secret", "secrets")
_STORAGE_CLASS = _Kind("storage class", "storage_classes")
# Keys that lead to the name of another object, and the object's kind.
_OF_VOLUMES = (
    (("secret", "secretName"), _SECRET),
    (("configMap", "name"), _CONFIG_MAP),
    (("persistentVolumeClaim", "claimName"), _CLAIM),
)
_OF_PROJECTED = ((("secret", "name"), _SECRET), (("configMap", "name"), _CONFIG_MAP))
_OF_ENVIRONMENT = (
    ("env", ("valueFrom", "secretKeyRef", "name"), _SECRET),
    ("env", ("valueFrom", "configMapKeyRef", "name"), _CONFIG_MAP),
    ("envFrom", ("secretRef", "name"), _SECRET),
    ("envFrom", ("configMapRef", "name"), _CONFIG_MAP),
)


@pydantic_dataclass(
    frozen=True,
    config=ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        coerce_numbers_to_str=True,
    ),
)
class AdminPolicy:
    """What jobs may use of their namespace and its nodes; `*` means everything.

    These defaults are for a controller that somebody starts by hand. The chart's defaults are narrower.
    """

    host_paths: tuple[_Folder, ...] = (_ANY,)  # folders to read, with everything under them
    writable_host_paths: tuple[_Folder, ...] = (_ANY,)  # those to write too, each as a whole; `*`: all of host_paths
    nfs: tuple[_Folder, ...] = (_ANY,)  # SERVER:/PATH, with everything under it
    claims: tuple[str, ...] = (_ANY,)
    storage_classes: tuple[str, ...] = (_ANY,)  # of ephemeral volumes
    config_maps: tuple[str, ...] = (_ANY,)  # as files and variables, apart from the job's own
    image_registries: tuple[str, ...] = (_ANY,)  # repositories, with everything under them
    labels: tuple[str, ...] = (_ANY,)  # keys of labels of pods, by which Services of others select theirs
    annotations: tuple[str, ...] = (_ANY,)  # keys of annotations of pods, by which others give them networks and rights
    groups: tuple[int | Literal["*"], ...] = (_ANY,)  # of pods, besides stage2's own
    pull_secrets: tuple[str, ...] = (_ANY,)
    service_accounts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = (_ANY,)  # as files and variables, apart from the job's own token
    runtime_classes: tuple[str, ...] = (_ANY,)
    resource_claim_templates: tuple[str, ...] = (_ANY,)
    reward_files: bool = True  # whether jobs may carry Python files with rewards
    largest_job: Mapping[str, int] = field(default_factory=dict)  # most GPUs of a job, by namespace; `*`: all others
    longest_start_seconds: int = 0  # a longer spec.learner.startDeadlineSeconds counts as this; 0: none does

    def check(self, job: RolloutMatchingJob) -> None:
        """Raise ConfigError with everything in the job that the policy does not allow."""
        if problems := list(self._problems(job.spec)):
            raise ConfigError(problems)

    def check_size(self, namespace: str, requested: Amounts) -> None:
        """Raise ConfigError if a job's pods, templates included, request more devices of a kind than it may have."""
        most = self.largest_job.get(namespace, self.largest_job.get(_ANY))
        if most is None:
            return
        rule = f"this cluster lets a job of namespace {namespace} have {most} GPUs, or other devices of one kind"
        way_out = "ask for fewer, or ask the admin to raise policy.largestJob of the chart"
        devices = {name: amount for name, amount in requested.items() if "/" in name and amount > most}
        if devices:
            raise ConfigError(
                [Problem("spec", f"{amount:g} {name}", rule, way_out) for name, amount in devices.items()]
            )

    def _problems(self, spec: JobSpec) -> Iterator[Problem]:
        yield from self._images("spec", {"image": spec.image} if spec.image is not None else {})
        for index, secret in enumerate(spec.image_pull_secrets):
            yield from self._unlisted(f"spec.imagePullSecrets[{index}].name", secret.name, _PULL_SECRET)
        for index, volume in enumerate(spec.volumes):
            yield from self._volume(f"spec.volumes[{index}]", volume.source)
        for role, part in _roles(spec):
            path, metadata = f"spec.{role}.template", part.template.get("metadata") or {}
            if part.resource_claim_template is not None:
                where = f"spec.{role}.resourceClaimTemplate"
                yield from self._unlisted(where, part.resource_claim_template, _CLAIM_TEMPLATE)
            for key, kind in (("labels", _LABEL), ("annotations", _ANNOTATION)):
                for name in metadata.get(key) or {}:
                    yield from self._unlisted(f"{path}.metadata.{key}[{name}]", name, kind)
            yield from self._pod(f"{path}.spec", part.template.get("spec") or {})
        yield from self._writers(spec)
        if (rlhf := spec.config.rlhf) is not None and rlhf.reward_files and not self.reward_files:
            yield Problem("spec.config.rlhf.reward_files", ", ".join(sorted(rlhf.reward_files)), _NO_CODE, _PACKAGE)

    def _pod(self, path: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
        for key, kind in (("serviceAccountName", _ACCOUNT), ("runtimeClassName", _CLASS)):
            if pod.get(key, "") != "":  # the API server drops an empty one
                yield from self._unlisted(f"{path}.{key}", pod[key], kind)
        yield from self._groups(path, pod)
        for index, secret in enumerate(pod.get("imagePullSecrets") or []):
            yield from self._name(f"{path}.imagePullSecrets[{index}]", secret, ("name",), _PULL_SECRET)
        for index, volume in enumerate(pod.get("volumes") or []):
            yield from self._volume(f"{path}.volumes[{index}]", volume)
        for where, container in _containers(path, pod):
            yield from self._images(where, container)
            yield from self._groups(where, container)
            for part, keys, kind in _OF_ENVIRONMENT:
                for index, item in enumerate(container.get(part) or []):
                    yield from self._name(f"{where}.{part}[{index}]", item, keys, kind)

    def shortened(self, job: RolloutMatchingJob) -> RolloutMatchingJob:
        """Return the job with its start deadline lowered to what the policy allows."""
        if not 0 < self.longest_start_seconds < job.spec.learner.start_deadline_seconds:
            return job
        learner = job.spec.learner.model_copy(update={"start_deadline_seconds": self.longest_start_seconds})
        return job.model_copy(update={"spec": job.spec.model_copy(update={"learner": learner})})

    def _images(self, path: str, holder: Mapping[str, Any]) -> Iterator[Problem]:
        image, allowed = holder.get("image"), self.image_registries
        if image is not None and _ANY not in allowed and not any(_covers(entry, str(image)) for entry in allowed):
            yield self._refused(f"{path}.image", image, _IMAGE)

    def _groups(self, path: str, holder: Mapping[str, Any]) -> Iterator[Problem]:
        context: Mapping[str, Any] = holder.get("securityContext") or {}
        listed = context.get("supplementalGroups", [])
        chosen = {key: [context[key]] for key in ("runAsGroup", "fsGroup") if key in context}
        for key, groups in {**chosen, "supplementalGroups": listed if isinstance(listed, list) else [listed]}.items():
            for group in groups:
                if group != layout.GROUP:
                    yield from self._unlisted(f"{path}.securityContext.{key}", group, _GROUP)

    def _volume(self, path: str, volume: Mapping[str, Any]) -> Iterator[Problem]:
        for keys, kind in _OF_VOLUMES:
            yield from self._name(path, volume, keys, kind)
        for index, source in enumerate(value_at(volume, "projected", "sources") or []):
            for keys, kind in _OF_PROJECTED:
                yield from self._name(f"{path}.projected.sources[{index}]", source, keys, kind)
        if volume.get("ephemeral") is not None:
            where = f"{path}.ephemeral.volumeClaimTemplate.spec.storageClassName"
            claim = value_at(volume, "ephemeral", "volumeClaimTemplate", "spec")
            yield from self._unlisted(where, value_at(claim, "storageClassName") or "", _STORAGE_CLASS)
        if volume.get("hostPath") is not None:
            yield from self._folder(f"{path}.hostPath.path", value_at(volume, "hostPath", "path"))
        if volume.get("nfs") is not None:
            server, folder = (value_at(volume, "nfs", key) for key in ("server", "path"))
            export = f"{server}:{_without_slash(folder)}"
            # The server is a host alone: `files.example:/export` as a server would be the beginning of any export.
            is_plain = isinstance(server, str) and "/" not in server and _is_plain(folder, root=True)
            if _ANY not in self.nfs and not (is_plain and _lies_in(export, self.nfs)):
                yield self._refused(f"{path}.nfs", export, _EXPORT)

    def _folder(self, path: str, folder: Any) -> Iterator[Problem]:
        if _ANY in self.host_paths:
            return
        where = _without_slash(folder)
        if not (_is_plain(folder) and _lies_in(where, self.host_paths)):
            yield self._refused(path, folder, _FOLDER)
        for above in self._writable:
            if where.startswith(f"{above}/"):
                rule = f"may be a link that a job made, because jobs write {above} (policy.writableHostPaths)"
                way_out = f"mount {above}, with subPath: {where.removeprefix(above + '/')}"
                yield Problem(path, folder, rule, f"{way_out}; policy.writableHostPaths lists what jobs write")
                return

    @property
    def _writable(self) -> tuple[str, ...]:
        return self.host_paths if _ANY in self.writable_host_paths else self.writable_host_paths

    def _writers(self, spec: JobSpec) -> Iterator[Problem]:
        """Refuse mounts that could write a folder of a node that may only be read.

        A template is merged over stage2's own pod. So a name counts wherever it stands, and a mount without one too.
        """
        pods = [(f"spec.{role}.template.spec", part.template.get("spec") or {}) for role, part in _roles(spec)]
        sources: list[tuple[Any, Mapping[str, Any]]] = [(volume.name, volume.source) for volume in spec.volumes]
        sources += [(volume.get("name", ""), volume) for _, pod in pods for volume in pod.get("volumes") or []]
        read_only = [name for name, source in sources if not self._may_be_written(source)]
        mounts: list[tuple[str, Any, Any]] = [
            (f"spec.volumes[{index}].readOnly", volume.name, volume.read_only)
            for index, volume in enumerate(spec.volumes)
        ]
        mounts += [mount for path, pod in pods for mount in _mounts(path, pod)]
        for path, name, is_read_only in mounts:
            if is_read_only is not True and (name in read_only or (name is None and read_only)):
                yield Problem(path, is_read_only, _READ_ONLY, _TO_WRITE)

    def _may_be_written(self, source: Mapping[str, Any]) -> bool:
        if source.get("hostPath") is None or _ANY in self._writable:
            return True
        return _without_slash(value_at(source, "hostPath", "path")) in self._writable

    def _name(self, path: str, holder: Any, keys: Sequence[str], kind: _Kind) -> Iterator[Problem]:
        """Refuse a reference below these keys whose name is missing or not listed."""
        *above, last = keys
        reference = value_at(holder, *above)
        if reference is not None:
            name = reference.get(last, "") if isinstance(reference, Mapping) else ""
            yield from self._unlisted(f"{path}.{'.'.join(keys)}", name, kind)

    def _unlisted(self, path: str, name: Any, kind: _Kind) -> Iterator[Problem]:
        allowed = getattr(self, kind.entries)
        if _ANY not in allowed and name not in allowed:
            yield self._refused(path, name, kind)

    def _refused(self, path: str, value: Any, kind: _Kind) -> Problem:
        allowed = getattr(self, kind.entries)
        what = f"as {kind.words} only {', '.join(map(str, allowed))}" if allowed else f"no {kind.words}"
        way_out = f"change or remove it, or ask the admin to add it to policy.{to_camel(kind.entries)} of the chart"
        return Problem(path, value, f"this cluster lets jobs use {what}", way_out)


def read_policy(text: str) -> AdminPolicy:
    """Return the policy that the chart wrote as JSON under the names of its values; else raise ValueError."""
    return TypeAdapter(AdminPolicy).validate_json(text)


def _roles(spec: JobSpec) -> tuple[tuple[str, RolloutSpec | LearnerSpec], ...]:
    return ("rollout", spec.rollout), ("learner", spec.learner)


def _containers(path: str, pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(key) or []):
            yield f"{path}.{key}[{index}]", container


def _covers(entry: str, image: str) -> bool:
    """Return whether an entry is the image's repository, or a path above it: whole segments, and no other port."""
    rest = image.removeprefix(entry)
    return image.startswith(entry) and (entry.endswith("/") or _TAG_OR_PATH.fullmatch(rest) is not None)


def _mounts(path: str, pod: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, volume and readOnly of a template's mounts; volume None where it is that of stage2's own mount."""
    for where, container in _containers(path, pod):
        for index, mount in enumerate(container.get("volumeMounts") or []):
            if mount.keys() & {"name", "readOnly"}:
                yield f"{where}.volumeMounts[{index}].readOnly", mount.get("name"), mount.get("readOnly", False)


def _without_slash(folder: Any) -> str:
    return str(folder or "").removesuffix("/")


def _is_plain(folder: Any, *, root: bool = False) -> bool:
    """Return whether a path is absolute and has one spelling. root: also the path `/`."""
    if not isinstance(folder, str):
        return False
    path = _without_slash(folder)
    plain = _PLAIN.fullmatch(path) is not None or (root and folder == "/")
    return plain and not {".", ".."}.intersection(path.split("/"))


def _lies_in(path: str, allowed: tuple[str, ...]) -> bool:
    return any(path == entry or path.startswith(f"{entry}/") for entry in allowed)


DEFAULT_IMAGE = "registry.invalid/trainer:none"
"""Stands for the image of jobs that name none where no chart names one: nobody can own the host (RFC 6761)."""


@dataclass(frozen=True)
class Settings:
    """The part of the controller's own configuration that shapes jobs."""

    image: str = DEFAULT_IMAGE
    namespace: str | None = None  # where the controller's own pod runs; None: outside the cluster
    progress_s: float = 10.0  # seconds between requests for a running learner's progress
    policy: AdminPolicy = field(default_factory=AdminPolicy)  # what jobs may use
    nodes_may_come: bool = True  # jobs that fit nowhere have pending pods, for an autoscaler to see
    kueue: bool = False  # write Workloads for jobs that name a queue; needs Kueue's definitions
