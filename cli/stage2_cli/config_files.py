"""Job files and training YAML, with changes of `--set`. Errors name the file and, for invalid YAML, the line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem, kind_of, refused
from stage2_api.grpo import LARGEST_REWARD_FILE, reward_file
from stage2_api.job import GROUP, KIND, RolloutMatchingJob
from stage2_api.parsing import merged, parse_job, parse_run_config, resolve_extends
from stage2_api.runconfig import RunConfig
from stage2_controller.job.objects import value_at
from stage2_trainer.data.bounded_yaml import parse_documents, read_documents
from stage2_trainer.data.files import read_regular

WATCHED = ("spec.suspend", "spec.evictionLimit", "spec.activeDeadlineSeconds", "spec.ttlSecondsAfterFinished")
"""Fields that need a running controller."""
OF_JOBSET = ("spec.suspend", "spec.ttlSecondsAfterFinished")
"""Those that JobSet honours."""
CLUSTER = (*WATCHED, "spec.rollout.template", "spec.learner.template", "spec.tls.enabled", "spec.network.egress")
"""Fields that need a cluster: local processes have neither pods nor a network."""


def load_documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file, in order, without empty ones.

    Raises ConfigError if the file is missing, is not YAML, or holds anything but mappings.
    """
    documents = read_documents(path)
    if not documents:
        raise refused(
            str(path), None, "must hold a YAML mapping, and is empty", "write a job or a training configuration"
        )
    for document in documents:
        if not isinstance(document, dict):
            rule, way_out = "each document must be a mapping", "start it with `key: value` lines"
            raise refused(str(path), kind_of(document), rule, way_out)
    return documents


def jobs_and_others(documents: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the jobs of a file, and the kinds and names of other Kubernetes objects, such as a ConfigMap of a job's.

    If no object is a job, all count as jobs, so that each is refused with what it lacks.
    """
    jobs = [one for one in documents if not _is_other_object(one)]
    if not jobs:
        return list(documents), []
    others = [one for one in documents if _is_other_object(one)]
    return jobs, [f"{one['kind']} {value_at(one, 'metadata', 'name') or ''}".rstrip() for one in others]


def _is_other_object(document: Mapping[str, Any]) -> bool:
    kind, version = document.get("kind"), document.get("apiVersion", "")
    return isinstance(kind, str) and kind != KIND and not str(version).startswith(f"{GROUP}/")


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the only mapping of a YAML file. Raises ConfigError when there are several documents."""
    return only_document(path, load_documents(path))


def only_document(path: Path, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the only document of a file. Raises ConfigError when there are several."""
    if len(documents) > 1:
        raise refused(str(path), f"{len(documents)} documents", "must be one document", "split the file at `---`")
    return documents[0]


def load(path: Path, changes: Sequence[str] = ()) -> RolloutMatchingJob | RunConfig:
    """Return the job of a job file, or a training YAML with its `extends` resolved. Raises ConfigError.

    changes: values of `--set`.
    """
    raw = load_yaml(path)
    if is_job(raw):
        return parse_job(completed(path, raw, changes))
    return parse_run_config(completed(path, with_bases(path, raw), changes))


def load_config(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Return a training YAML, or the `spec.config` of a job file, as `load` does."""
    found = load(path, changes)
    return found if isinstance(found, RunConfig) else found.spec.config


def load_addressed(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Return the same, but refuse a job with servers: they have no addresses before something starts the job."""
    found = load(path, changes)
    if isinstance(found, RunConfig):
        return found
    if servers := found.spec.rollout.servers:
        rule = "the servers of a job have addresses only where something starts all of it"
        way_out = f"use `stage2 run {path}`, or a training YAML that lists the servers' addresses"
        raise refused("spec.rollout.servers", servers, rule, way_out)
    return found.spec.config


def completed(path: Path, raw: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
    """Return a job, or a training YAML, with its changes and with the reward files that are beside it.

    path: of its file. A job that already carries the texts of its reward files keeps them. Raises ConfigError.
    """
    raw = changed(raw, changes)
    above = ("spec", "config") if is_job(raw) else ()
    rlhf = value_at(raw, *above, "rlhf")
    names = value_at(rlhf, "reward_funcs")
    if not isinstance(names, list) or value_at(rlhf, "reward_files") is not None:
        return raw
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    for index, name in enumerate(names):
        if (file := reward_file(name)) is not None and file not in texts:
            try:
                texts[file] = _text_beside(path, file, ".".join([*above, f"rlhf.reward_funcs[{index}]"]), name)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    carried: Any = {"reward_files": texts} if texts else {}
    for part in reversed([*above, "rlhf"]):
        carried = {part: carried}
    return merged(raw, carried)


def _text_beside(path: Path, name: str, where: str, reward: str) -> str:
    """Return the text of a reward file in the folder of `path`. Raises ConfigError, also for a link out of the folder.

    where, reward: the key that names it, and its value.
    """
    file = path.parent / name
    if Path(real := os.path.realpath(file)).parent != Path(os.path.realpath(path.parent)):
        rule = f"{file} is a link to {real}, which is not beside {path.name}"
        raise refused(where, reward, rule, "replace the link by the file")
    try:
        text = read_regular(file, most=4 * LARGEST_REWARD_FILE).decode("utf-8-sig")
    except FileNotFoundError as error:
        rule = f"the file of a reward must be beside {path.name}, and there is no {file}"
        raise refused(where, reward, rule, "put it there, or correct its name") from error
    except OSError as error:
        rule = f"{file} must be a readable file ({error.strerror})"
        raise refused(where, reward, rule, "put the file there") from error
    except UnicodeDecodeError as error:
        raise refused(where, reward, f"{file} must be UTF-8 ({error})", "save it as UTF-8") from error
    if len(text) > LARGEST_REWARD_FILE:
        rule = f"{file} must have at most {LARGEST_REWARD_FILE:,} characters, and has {len(text):,}"
        raise refused(where, reward, rule, "make a package of it: docs/grpo.md has a complete one")
    return text


def changed(raw: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
    """Return a job, or a training YAML, with values of its training configuration changed: each reads `KEY=VALUE`.

    A value is YAML, but `no`, `off`, `yes` and `on` are texts. Raises ConfigError for a malformed change; the parser
    refuses an unknown key.
    """
    for change in changes:
        key, sign, text = change.partition("=")
        keys = key.split(".")
        if not sign or not all(keys):
            rule, way_out = "must read KEY=VALUE with a dotted key", "write for example --set training.max_steps=40"
            raise refused("--set", change, rule, way_out)
        documents = parse_documents(text, f"--set {key}")
        if len(documents) > 1:
            raise refused(f"--set {key}", f"{len(documents)} documents", "must be one value", "leave out `---`")
        empty = "" if text.strip()[:1] in ("'", '"') else None  # documents without content are left out
        value: Any = documents[0] if documents else empty
        if isinstance(value, bool) and text.strip().lower() not in ("true", "false"):
            value = text.strip()
        for part in reversed(["spec", "config", *keys] if is_job(raw) else keys):
            value = {part: value}
        raw = merged(raw, value)
    return raw


def with_bases(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's mapping merged over those that it extends, without reading the file again: it may be a pipe."""
    return resolve_extends(path, lambda file: raw if file == path else load_yaml(file))


def load_job(path: Path, changes: Sequence[str] = ()) -> RolloutMatchingJob:
    """Return the job of a RolloutMatchingJob file, with the changes of `--set`. Raises ConfigError."""
    return read_job(path, changes)[1]


def read_job(path: Path, changes: Sequence[str] = ()) -> tuple[Mapping[str, Any], RolloutMatchingJob]:
    """Return the same job as its author wrote it, with its reward files, and as it is parsed."""
    raw = load_yaml(path)
    if not is_job(raw):
        way_out = "give a file with `kind: RolloutMatchingJob`; `stage2 validate` also takes a training YAML"
        raise refused("kind", raw.get("kind"), "must be RolloutMatchingJob", way_out)
    written = completed(path, raw, changes)
    return written, parse_job(written)


def is_job(raw: Mapping[str, Any]) -> bool:
    """Whether a mapping is a Kubernetes object (a job) rather than a training YAML."""
    return "kind" in raw or "apiVersion" in raw


def set_fields(job: RolloutMatchingJob, fields: Sequence[str]) -> list[str]:
    """Return the fields that the job sets to anything but false or empty."""
    written: Any = job.model_dump(by_alias=True, exclude_unset=True)
    return [path for path in fields if reduce(lambda section, key: (section or {}).get(key), path.split("."), written)]
