"""The part of the controller's own configuration that shapes jobs: `Settings`, and the admin's policy in it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass as pydantic_dataclass

from stage2_api.errors import ConfigError, Problem
from stage2_api.job import JobSpec, RolloutMatchingJob
from stage2_controller.spec.objects import Amounts, value_at

_ANY = "*"
_TAG_OR_PATH = re.compile(r"([:@][^/]*|/.*)?")  # what may follow a repository, as in the chart's policy.yaml


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

    host_paths: tuple[str, ...] = (_ANY,)  # folders, with everything under them
    image_registries: tuple[str, ...] = (_ANY,)  # repositories, with everything under them
    labels: tuple[str, ...] = (_ANY,)  # keys of labels of pods, by which Services of others select theirs
    pull_secrets: tuple[str, ...] = (_ANY,)
    service_accounts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = (_ANY,)  # as files and variables, apart from the job's own token
    runtime_classes: tuple[str, ...] = (_ANY,)
    resource_claim_templates: tuple[str, ...] = (_ANY,)
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
        yield from self._images("spec", {"image": spec.image} if spec.image else {})
        pulls = [{"name": one.name} for one in spec.image_pull_secrets]
        yield from _each("spec.imagePullSecrets", pulls, self.pull_secrets, _PULL_SECRET, "name")
        for index, volume in enumerate(spec.volumes):
            yield from self._volume(f"spec.volumes[{index}]", volume.source)
        for role, part in (("rollout", spec.rollout), ("learner", spec.learner)):
            claim = part.resource_claim_template
            yield from _unlisted(f"spec.{role}.resourceClaimTemplate", claim, self.resource_claim_templates, _CLAIM)
            for key in value_at(part.template, "metadata", "labels") or {}:
                yield from _unlisted(f"spec.{role}.template.metadata.labels[{key}]", key, self.labels, _LABEL)
            yield from self._pod(f"spec.{role}.template.spec", part.template.get("spec") or {})

    def _pod(self, path: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
        yield from _unlisted(
            f"{path}.serviceAccountName", pod.get("serviceAccountName"), self.service_accounts, _ACCOUNT
        )
        yield from _unlisted(f"{path}.runtimeClassName", pod.get("runtimeClassName"), self.runtime_classes, _CLASS)
        pulls = pod.get("imagePullSecrets")
        yield from _each(f"{path}.imagePullSecrets", pulls, self.pull_secrets, _PULL_SECRET, "name")
        for index, volume in enumerate(pod.get("volumes") or []):
            yield from self._volume(f"{path}.volumes[{index}]", volume)
        for key in ("containers", "initContainers"):
            for index, container in enumerate(pod.get(key) or []):
                where = f"{path}.{key}[{index}]"
                yield from self._images(where, container)
                for part, *keys in _OF_ENVIRONMENT:
                    yield from _each(f"{where}.{part}", container.get(part), self.secrets, _SECRET, *keys)

    def shortened(self, job: RolloutMatchingJob) -> RolloutMatchingJob:
        """Return the job with its start deadline lowered to what the policy allows."""
        if not 0 < self.longest_start_seconds < job.spec.learner.start_deadline_seconds:
            return job
        learner = job.spec.learner.model_copy(update={"start_deadline_seconds": self.longest_start_seconds})
        return job.model_copy(update={"spec": job.spec.model_copy(update={"learner": learner})})

    def _images(self, path: str, holder: Mapping[str, Any]) -> Iterator[Problem]:
        image = holder.get("image")
        allowed = self.image_registries
        if image is not None and _ANY not in allowed and not any(_covers(entry, str(image)) for entry in allowed):
            yield _refused(f"{path}.image", image, allowed, _IMAGE)

    def _volume(self, path: str, volume: Mapping[str, Any]) -> Iterator[Problem]:
        yield from _unlisted(
            f"{path}.secret.secretName", value_at(volume, "secret", "secretName"), self.secrets, _SECRET
        )
        sources = value_at(volume, "projected", "sources")
        yield from _each(f"{path}.projected.sources", sources, self.secrets, _SECRET, "secret", "name")
        folder = value_at(volume, "hostPath", "path")
        if folder is not None and _ANY not in self.host_paths and not _lies_in(str(folder), self.host_paths):
            yield _refused(f"{path}.hostPath.path", folder, self.host_paths, _FOLDER)


_ACCOUNT = ("service account", "policy.serviceAccounts")
_OF_ENVIRONMENT = (("env", "valueFrom", "secretKeyRef", "name"), ("envFrom", "secretRef", "name"))
_CLASS = ("runtime class", "policy.runtimeClasses")
_CLAIM = ("ResourceClaimTemplate", "policy.resourceClaimTemplates")
_SECRET = ("Secret", "policy.secrets")
_PULL_SECRET = ("Secret of a registry", "policy.pullSecrets")
_LABEL = ("label of pods", "policy.labels")
_IMAGE = ("image registry", "policy.imageRegistries")
_FOLDER = ("folder of a node", "policy.hostPaths")


def read_policy(text: str) -> AdminPolicy:
    """Return the policy that the chart wrote as JSON under the names of its values; else raise ValueError."""
    return TypeAdapter(AdminPolicy).validate_json(text)


def _unlisted(path: str, name: Any, allowed: tuple[str, ...], what: tuple[str, str]) -> Iterator[Problem]:
    if name is not None and _ANY not in allowed and name not in allowed:
        yield _refused(path, name, allowed, what)


def _each(path: str, items: Any, allowed: tuple[str, ...], what: tuple[str, str], *keys: str) -> Iterator[Problem]:
    """Refuse the unlisted names that a list's items have below these keys."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        yield from _unlisted(f"{path}[{index}].{'.'.join(keys)}", value_at(item, *keys), allowed, what)


def _refused(path: str, value: Any, allowed: tuple[str, ...], what: tuple[str, str]) -> Problem:
    kind, key = what
    rule = f"this cluster lets jobs use {'no ' + kind if not allowed else 'as ' + kind + ' only ' + ', '.join(allowed)}"
    return Problem(path, value, rule, f"change or remove it, or ask the admin to add it to {key} of the chart")


def _covers(entry: str, image: str) -> bool:
    """Return whether an entry is the image's repository, or a path above it: whole segments, and no other port."""
    rest = image.removeprefix(entry)
    return image.startswith(entry) and (entry.endswith("/") or _TAG_OR_PATH.fullmatch(rest) is not None)


def _lies_in(folder: str, allowed: tuple[str, ...]) -> bool:
    path = PurePosixPath(folder)
    return ".." not in path.parts and any(path.is_relative_to(prefix) for prefix in allowed)


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
