"""What a spec becomes: names of children, quantities, merged templates, and processes of any executor."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stage2_api.parsing import parse_job, parse_run_config
from stage2_controller.job import names, objects
from stage2_controller.job.containers import Container, Processes, containers
from stage2_controller.job.objects import strategic_merge
from tests.unit.controller import builders as b


@pytest.fixture
def local() -> Processes:
    return containers(parse_job(b.job()), host_for=lambda _: "127.0.0.1", tls=True)


def test_written_config_lists_server_addresses_of_executor(local: Processes) -> None:
    servers = parse_run_config(yaml.safe_load(local.config_text)).rollout_matching.vllm.server.resolved_servers()
    assert tuple(servers) == local.addresses
    assert [(server.base_url, server.group_port) for server in servers] == [
        ("https://127.0.0.1:8000", 51216),
        ("https://127.0.0.1:8001", 51217),
        ("https://127.0.0.1:8002", 51218),
    ]


def test_relocated_container_uses_files_in_new_folder(local: Processes) -> None:
    moved: Container = local.learner.relocated("/run/here")
    assert moved.command == ("stage2", "learn", "/run/here/config/config.yaml")
    assert moved.env["STAGE2_TOKEN_FILE"] == "/run/here/token/token"
    assert moved.env["STAGE2_TERMINATION_LOG"] == "/run/here/termination-log"


READ: list[tuple[Any, float]] = [
    ("2", 2.0),
    (2, 2.0),
    (0.5, 0.5),
    (1e20, 1e20),
    ("+1.5", 1.5),
    ("-1", -1.0),
    ("1.", 1.0),
    (".5Gi", 2.0**29),
    ("500m", 0.5),
    ("3E", 3e18),
    ("3e2", 300.0),
    ("3E-2", 0.03),
    ("3Ei", 3 * 2.0**60),
    ("9223372036854775807", 2.0**63),
]
NONE: list[Any] = [
    "nan",
    "inf",
    "infinity",
    "-Infinity",
    "1_000",
    " 1 ",
    "1\n",
    "\u0661",
    "",
    ".",
    "m",
    "1e3k",
    "1kk",
    "0x1",
]
UNBOUNDED: list[Any] = ["1e400", "-1e400", "9" * 400, "9" * 299 + "Ei", float("inf"), float("nan"), 10**5000]


@pytest.mark.parametrize(("written", "amount"), READ)
def test_kubernetes_quantity_is_parsed_to_base_units(written: Any, amount: float) -> None:
    assert objects.parse_quantity(written) == pytest.approx(amount, rel=1e-12)


@pytest.mark.parametrize("written", [*NONE, *UNBOUNDED, True, None], ids=lambda written: type(written).__name__)
def test_invalid_or_unbounded_quantity_is_none(written: Any) -> None:
    assert objects.parse_quantity(written) is None


CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("a new key is added", {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ("a scalar is replaced", {"a": 1}, {"a": 2}, {"a": 2}),
    ("null removes a key", {"a": 1, "b": 2}, {"a": None}, {"b": 2}),
    ("mappings merge", {"m": {"a": 1}}, {"m": {"b": 2}}, {"m": {"a": 1, "b": 2}}),
    (
        "containers merge by name",
        {"containers": [{"name": "x", "image": "i"}]},
        {"containers": [{"name": "x", "tty": True}, {"name": "y"}]},
        {"containers": [{"name": "x", "image": "i", "tty": True}, {"name": "y"}]},
    ),
    (
        "environment variables merge by name",
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
    ),
    ("a list without a merge key is replaced", {"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
    (
        "mounts merge by path",
        {"volumeMounts": [{"mountPath": "/a", "name": "x"}]},
        {"volumeMounts": [{"mountPath": "/a", "readOnly": True}]},
        {"volumeMounts": [{"mountPath": "/a", "name": "x", "readOnly": True}]},
    ),
]


@pytest.mark.parametrize(("base", "patch", "merged"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_strategic_merge_follows_kubernetes_rules(
    base: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert strategic_merge(base, patch) == merged


def test_strategic_merge_changes_neither_input() -> None:
    base: dict[str, Any] = {"containers": [{"name": "x", "env": []}]}
    patch: dict[str, Any] = {"containers": [{"name": "x", "env": [{"name": "A"}]}]}
    merged = strategic_merge(base, patch)
    merged["containers"][0]["env"].append("changed")
    assert base == {"containers": [{"name": "x", "env": []}]}
    assert patch == {"containers": [{"name": "x", "env": [{"name": "A"}]}]}


JOB_NAME = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)
ROLES = st.sampled_from([names.ROLE_ROLLOUT, names.ROLE_LEARNER, names.ROLE_CONFIG, names.ROLE_TOKEN])


def test_short_job_name_is_kept_in_child_names() -> None:
    assert names.child_name("job-3v1", names.ROLE_ROLLOUT) == "job-3v1-rollout"
    assert names.service_host("job-3v1", "team-a") == "job-3v1-rollout.team-a.svc"


@given(JOB_NAME, ROLES)
def test_child_names_are_valid_service_names_and_label_values(job: str, role: str) -> None:
    name = names.child_name(job, role)
    assert len(name) <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert name.endswith(f"-{role}")


@given(JOB_NAME, JOB_NAME, ROLES)
def test_different_jobs_never_share_child_name(one: str, other: str, role: str) -> None:
    assert (names.child_name(one, role) == names.child_name(other, role)) == (one == other)


def test_long_job_names_that_differ_at_end_get_different_child_names() -> None:
    one, other = "a" * 200 + "1", "a" * 200 + "2"
    assert names.child_name(one, names.ROLE_ROLLOUT) != names.child_name(other, names.ROLE_ROLLOUT)
