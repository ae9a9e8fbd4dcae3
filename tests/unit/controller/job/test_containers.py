"""One plan, three executors: the processes of `stage2 run` are the containers of the pods."""

from typing import Any

import pytest
import yaml

from stage2_api.parsing import parse_job, parse_run_config
from stage2_controller.spec.containers import Container, Processes, containers
from tests.unit.controller import builders as b


@pytest.fixture
def local() -> Processes:
    return containers(parse_job(b.job()), host_for=lambda _: "127.0.0.1", tls=True)


def in_pods() -> dict[str, Any]:
    raw = b.job()
    made = b.planned(raw, b.started(raw))
    pods = [b.child(made, kind)["spec"]["template"]["spec"] for kind in ("Deployment", "Job")]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


def test_processes_and_pods_run_the_same_commands_in_the_same_environment(local: Processes) -> None:
    for process in (*local.servers, local.learner):
        container = in_pods()[process.name]
        command = [word for word in container["command"] if not word.startswith("--restarts=")]
        assert command == list(process.command)
        assert {item["name"]: item["value"] for item in container["env"]} == process.env
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == process.ports


def test_the_written_configuration_names_the_servers_where_the_executor_reaches_them(local: Processes) -> None:
    servers = parse_run_config(yaml.safe_load(local.config_text)).rollout_matching.vllm.server.resolved_servers()
    assert tuple(servers) == local.addresses
    assert [(server.base_url, server.group_port) for server in servers] == [
        ("https://127.0.0.1:8000", 51216),
        ("https://127.0.0.1:8001", 51217),
        ("https://127.0.0.1:8002", 51218),
    ]


def test_a_relocated_container_finds_its_files_in_another_folder(local: Processes) -> None:
    moved: Container = local.learner.relocated("/run/here")
    assert moved.command == ("stage2", "learn", "/run/here/config/config.yaml")
    assert moved.env["STAGE2_TOKEN_FILE"] == "/run/here/token/token"
    assert moved.env["STAGE2_TERMINATION_LOG"] == "/run/here/termination-log"
