"""Rules in CEL, for the API server, and their twins in Python agree on every job."""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage2_api import crd
from stage2_api.crd import FROZEN
from stage2_api.job import JobSpec
from stage2_api.rules.grpo import MODE_RULES
from stage2_api.rules.job import JOB_RULES
from stage2_api.rules.run import RUN_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.validation.validate import Rule
from tests.unit.api.api_server import SCHEMA, SPEC, defaulted, holds
from tests.unit.api.grpo_configs import GOOD_JOB
from tests.unit.api.wrong_jobs import good_job, merge_patch

pytestmark = pytest.mark.in_turns(3, apart=True)

Path = tuple[str, ...]

COLOCATE = {
    "rollout": None,
    "learner": {"gpus": 2},
    "config": {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": "colocate", "tensor_parallel_size": 2}}}}},
}
JOBS = (good_job()["spec"], GOOD_JOB["spec"], merge_patch(good_job()["spec"], COLOCATE))
CONFIG_RULES = [rule for rule in RUN_RULES if rule.cel is not None]
SPEC_RULES = [rule for rule in JOB_RULES if rule.cel is not None]
OF_MATCHING = ("config", "custom", "extra", "rollout_matching")
# Keys that nearly every rule depends on: the backend of rollouts, and the trainer.
GATES: tuple[Path, ...] = (
    (*OF_MATCHING, "rollout_backend"),
    (*OF_MATCHING, "vllm", "mode"),
    ("config", "rlhf"),
    ("config", "custom", "trainer_variant"),
    ("config", "training", "eval_strategy"),
)
EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True)
COUNTS = (0, 1, 2, 3, 4)
SIZES = (1, 512, 513, 4096, 8000, 8080, 65534, 65535)  # lengths and ports


def schema_at(path: Path) -> Mapping[str, Any]:
    """Return the schema of a key."""
    schema: Mapping[str, Any] = SPEC
    for part in path:
        schema = schema["properties"][part]
    return schema


def values(schema: Mapping[str, Any], numbers: Sequence[int]) -> st.SearchStrategy[Any]:
    """Return what a key may hold by its schema; of numbers, those that it takes."""
    low, high = schema.get("minimum", 0), schema.get("maximum", 2**31 - 1)
    integers = [n for n in numbers if low <= n <= high]
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "boolean": st.booleans(),
        "integer": st.sampled_from(integers or [low]),
        "number": st.sampled_from([0.25, 0.5]),
        "string": st.sampled_from(["x", "y"]),
    }
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("type") == "array":
        longest = min(schema.get("maxItems", 3), 3)
        return st.lists(values(schema["items"], numbers), min_size=schema.get("minItems", 0), max_size=longest)
    return kinds[schema["type"]]


SOURCES = {
    "persistentVolumeClaim": {"claimName": "c"},
    "hostPath": {"path": "/p"},
    "emptyDir": {},
    "configMap": {"name": "c"},
    "secret": {"secretName": "s"},
    "nfs": {"server": "s", "path": "/p"},
}
VOLUME = st.builds(
    lambda name, path, sources: {"name": name, "mountPath": path, **{kind: SOURCES[kind] for kind in sources}},
    st.sampled_from(["data", "output", "tmp", "shm", "stage2-config", "stage2-token"]),
    st.sampled_from(["/data", "/output", "/", "/tmp", "/dev/shm", "/etc/stage2", "/etc/stage2/token"]),
    st.lists(st.sampled_from(sorted(SOURCES)), max_size=3, unique=True),
)
VOLUMES = st.lists(VOLUME, max_size=4, unique_by=lambda volume: volume["name"])  # by the list's map keys
REQUIREMENT = st.fixed_dictionaries(
    {"key": st.just("k"), "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"])},
    optional={"values": st.lists(st.sampled_from(["1", "-2", "a", "", "+3", "9" * 19]), max_size=2)},
)
TERM = st.fixed_dictionaries({"matchExpressions": st.lists(REQUIREMENT, min_size=1, max_size=2)})
PREFERRED = st.fixed_dictionaries({"weight": st.just(1), "preference": TERM})
NODES = ("placement", "affinity", "nodeAffinity")
SPECIAL: dict[Path, st.SearchStrategy[Any]] = {
    ("gpuResource",): st.sampled_from(["", "nvidia.com/gpu"]),
    ("config", "rlhf", "reward_funcs"): st.lists(st.sampled_from(["a.b", "a.c", "a.py:d"]), min_size=1, max_size=3),
    (*OF_MATCHING, "vllm", "server", "servers"): st.just([{"base_url": "http://h:1", "group_port": 2}]),
    (*OF_MATCHING, "vllm", "server", "base_url"): st.just("http://h:1"),
    ("volumes",): VOLUMES,
    (*NODES, "requiredDuringSchedulingIgnoredDuringExecution"): st.fixed_dictionaries(
        {"nodeSelectorTerms": st.lists(TERM, min_size=1, max_size=2)}
    ),
    (*NODES, "preferredDuringSchedulingIgnoredDuringExecution"): st.lists(PREFERRED, max_size=2),
    ("config", "rlhf", "reward_files"): st.just({"a.py": "x = 1"}),
    ("config", "rlhf"): st.just({"reward_funcs": ["a.b"]}),
    ("config", "custom", "extra", "rollout_server"): st.just({"vllm_max_model_len": 4096}),
}


def is_drawn(path: Path) -> bool:
    """Return whether to draw a key: all but sections, except those that make another kind of run."""
    return path in SPECIAL or ("type" in schema_at(path) and "properties" not in schema_at(path))


def fits_run(path: Path, spec: Mapping[str, Any]) -> bool:
    """Return whether a key fits the run: GRPO has only two sections of `rollout_matching`."""
    shared = ("vllm", "server"), ("vllm", "sync")
    return path[:4] != OF_MATCHING or "rlhf" not in spec["config"] or path[4:6] in shared


@st.composite
def specs(draw: st.DrawFn, keys: frozenset[Path]) -> dict[str, Any]:
    """Draw one of three good specs, with some of `keys` removed or changed."""
    spec = copy.deepcopy(draw(st.sampled_from(JOBS)))
    numbers = draw(st.sampled_from([COUNTS, SIZES]))
    for path in sorted(filter(is_drawn, keys), key=lambda path: (len(path), path)):
        choice = draw(st.sampled_from(["leave", "leave", "remove", "set"]))
        if choice != "leave" and fits_run(path, spec):
            value = (
                draw(SPECIAL[path] if path in SPECIAL else values(schema_at(path), numbers))
                if choice == "set"
                else None
            )
            set_key(spec, path, value)
    return spec


def set_key(spec: dict[str, Any], path: Path, value: Any) -> None:
    """Set a key, or remove it with None. A required key stays, and no section with required keys is created."""
    here = spec
    for depth, part in enumerate(path[:-1], start=1):
        if part not in here and schema_at(path[:depth]).get("required"):
            return
        here = here.setdefault(part, {})
    if value is not None:
        here[path[-1]] = copy.deepcopy(value)
    elif path[-1] not in schema_at(path[:-1]).get("required", ()):
        here.pop(path[-1], None)


def keys_of(rule: Rule[Any], root: Path = ()) -> frozenset[Path]:
    """Return the keys on which the verdict of a rule can depend."""
    return frozenset({*GATES, *((*root, *path.split(".")) for path in rule.keys_read())})


def misplaced(config: RunConfig, rule: Rule[Any]) -> bool:
    """Return whether a run has keys of another trainer. It is refused for that, and other rules are meaningless."""
    return rule not in MODE_RULES and any(other.broken(config) for other in MODE_RULES)


@pytest.mark.parametrize(
    ("rule", "model"),
    [*((rule, JobSpec) for rule in SPEC_RULES), *((rule, RunConfig) for rule in CONFIG_RULES)],
    ids=lambda one: f"{one.path}: {one.rule}" if isinstance(one, Rule) else one.__name__,
)
def test_cel_rule_and_python_rule_agree(rule: Rule[Any], model: type[JobSpec | RunConfig]) -> None:
    expression = crd.expression(model, str(rule.cel))

    @given(specs(keys_of(rule, ("config",) if model is RunConfig else ())))
    @example(JOBS[0])
    @example(JOBS[1])
    @example(JOBS[2])
    @EXAMPLES
    def agree(spec: dict[str, Any]) -> None:
        job = JobSpec.model_validate(spec)
        if misplaced(job.config, rule):
            return
        if model is RunConfig:
            assert holds(expression, spec["config"]) == (not rule.broken(job.config))
        else:
            assert holds(expression, spec) == holds(expression, defaulted(SPEC, spec)) == (not rule.broken(job))

    agree()


SAMPLES: dict[str, st.SearchStrategy[Any]] = {
    "suspend": st.booleans(),
    "managedBy": st.sampled_from(["stage2.dev/controller", "x/y"]),
    "image": st.sampled_from(["a", "b"]),
    "gpuResource": st.sampled_from(["", "nvidia.com/gpu"]),
    "volumes": VOLUMES,
    "rollout": st.fixed_dictionaries(
        {"servers": st.integers(1, 2)}, optional={"port": st.just(8000), "serversPerPod": st.integers(1, 2)}
    ),
    "learner": st.fixed_dictionaries({}, optional={"gpus": st.integers(1, 2), "nodes": st.integers(1, 2)}),
    "placement": st.fixed_dictionaries(
        {}, optional={"nodeSelector": st.just({"a": "b"}), "mode": st.sampled_from(["Reserve", "Scheduler"])}
    ),
    "tls": st.fixed_dictionaries({}, optional={"enabled": st.booleans()}),
    "config": st.fixed_dictionaries({"global_max_length": st.integers(1, 2)}),
    "ttlSecondsAfterFinished": st.integers(1, 2),
    "engine": st.sampled_from(["Node", "JobSet"]),
}
SPECS = st.fixed_dictionaries({}, optional=SAMPLES)
PHASES = [None, "Pending", "Running", "Failed"]
UNSET: dict[str, Any] = {
    "engine": "Node",
    "gpuResource": "nvidia.com/gpu",
    "rollout": {"servers": 0, "port": 8000, "serversPerPod": 1},
    "learner": {"gpus": 1, "nodes": 1},
    "placement": {"mode": "Reserve"},
    "tls": {"enabled": True},
}
"""What it means that a key is not written."""


def meant(spec: Mapping[str, Any], key: str) -> Any:
    """Return what a spec says of a key, written or not."""
    unset = UNSET.get(key)
    return {**unset, **spec.get(key, {})} if isinstance(unset, dict) else spec.get(key, unset)


def changes_refused(old: Mapping[str, Any], new: Mapping[str, Any], phase: str | None) -> set[str]:
    """Return the keys of the spec of which the API server refuses the change."""
    old, new = defaulted(SPEC, old), defaulted(SPEC, new)
    status = {"status": {"phase": phase}} if phase else {}
    whole = SCHEMA["x-kubernetes-validations"]
    of_spec = [entry for entry in SPEC["x-kubernetes-validations"] if "oldSelf" in entry["rule"]]
    refused = [e for e in whole if not holds(e["rule"], {"spec": new, **status}, {"spec": old, **status})]
    refused += [entry for entry in of_spec if not holds(entry["rule"], new, old)]
    return {entry["fieldPath"].rpartition(".")[2] for entry in refused}


def may_change(key: str, old: Mapping[str, Any], new: Mapping[str, Any], phase: str | None) -> bool:
    """Return whether a key of a job's spec may get another value."""
    if key in ("managedBy", "engine"):
        return False
    if key == "rollout" and new.get("engine") == "JobSet":
        before, after = ({**meant(one, key), "servers": 0} for one in (old, new))
        if before == after:
            return True
    suspended = old.get("suspend", False) or new.get("suspend", False)
    return key not in FROZEN or suspended or phase == "Failed"


@given(SPECS, SPECS, st.sampled_from(PHASES))
@settings(max_examples=600, deadline=None, derandomize=True)
def test_frozen_keys_cannot_change_while_pods_exist(
    old: dict[str, Any], new: dict[str, Any], phase: str | None
) -> None:
    changed = {key for key in SAMPLES if meant(old, key) != meant(new, key)}
    assert changes_refused(old, new, phase) == {key for key in changed if not may_change(key, old, new, phase)}


def test_unchanged_job_breaks_no_update_rule() -> None:
    for spec in JOBS:
        assert changes_refused(spec, spec, "Running") == set()


def test_duplicate_mount_paths_in_different_spelling_are_found_only_by_python() -> None:
    spec = copy.deepcopy(JOBS[0])
    paths = (("a", "/a/b"), ("b", "/a//./b/"))
    spec["volumes"] = [{"name": name, "mountPath": path, "emptyDir": {}} for name, path in paths]
    (rule,) = [rule for rule in SPEC_RULES if "unique mountPath" in rule.rule]
    assert rule.broken(JobSpec.model_validate(spec))
    assert holds(crd.expression(JobSpec, str(rule.cel)), spec)


def mounted_at(path: str) -> dict[str, Any]:
    """Return the spec of a job with a volume at a path."""
    return {**JOBS[0], "volumes": [{"name": "data", "mountPath": path, "emptyDir": {}}]}


def refused_by_both(path: str) -> bool:
    """Return whether a volume may not be at a path; fails where Python and CEL differ."""
    spec = mounted_at(path)
    rules = [rule for rule in SPEC_RULES if rule.path == "volumes"]
    broken = any(rule.broken(JobSpec.model_validate(spec)) for rule in rules)
    assert broken is not all(holds(crd.expression(JobSpec, str(rule.cel)), spec) for rule in rules), path
    return broken


PARTS_OF_PATHS = st.sampled_from(["", ".", "..", "...", "etc", "stage2", "stage2x", "config", "tmp", "dev", "shm"])


@given(st.lists(PARTS_OF_PATHS, min_size=1, max_size=6))
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_cel_and_python_agree_on_reserved_mount_paths(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    meant = posixpath.normpath("///" + path)  # two slashes alone would stay
    ours = meant in ("/", "/tmp", "/dev/shm", "/etc/stage2") or f"{meant}/".startswith("/etc/stage2/config/")
    written = [part for part in parts if part not in ("", ".")]
    up = ".." in parts and (written[-1] == ".." or not {"stage2", "tmp", "shm"}.isdisjoint(written))
    assert refused_by_both(path) is (ours or up)
    assert up or not ours or ".." not in parts, "no way up leads to what is ours unseen"


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        *((path, True) for path in ("/etc//stage2/config", "/etc/./stage2", "//etc/stage2/", "/etc/stage2/tls/ca.crt")),
        *((path, False) for path in ("/etc/stage2/ca", "/data/../cache", "/etc/stage2/configs")),  # as ever
        *((path, True) for path in ("//", "/./", "/tmp/.", "/dev//shm/", "/x/../etc/stage2/config", "/data/..")),
        *((path, False) for path in ("/data/", "/etc", "/etc/stage2x", "/tmp/x", "/dev/shm/x", "/..data")),
        *((path, False) for path in ("/etc./stage2", "/tmp\n", "/etc/stage2\n", "/x/etc/stage2")),
    ],
)
def test_volume_may_not_cover_reserved_path_however_spelled(path: str, refused: bool) -> None:
    assert refused_by_both(path) is refused
