"""What a GRPO job becomes: one server with all copies of the model, and a learner process for each of its GPUs."""

from pathlib import Path

import yaml

from stage2_api.parsing import parse_job
from stage2_controller.children.build import static_children

JOB = Path(__file__).parents[4] / "examples" / "job-grpo-6v2.yaml"


def test_six_gpus_serve_on_port_8080_and_two_learn_in_a_process_each() -> None:
    children = {child["kind"]: child for child in static_children(parse_job(yaml.safe_load(JOB.read_text())))}
    (server,) = children["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["command"][:2] == ["stage2", "serve"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "6"
    assert [port["containerPort"] for port in server["ports"]] == [8080]
    (learner,) = children["Job"]["spec"]["template"]["spec"]["containers"]
    assert learner["command"][:2] == ["stage2", "learn"]
    assert "--processes=2" in learner["command"]
    assert learner["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_the_run_reaches_its_server_where_the_job_puts_it() -> None:
    children = {child["kind"]: child for child in static_children(parse_job(yaml.safe_load(JOB.read_text())))}
    config = yaml.safe_load(children["ConfigMap"]["data"]["config.yaml"])
    (server,) = config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"]
    assert server["base_url"].endswith(":8080")
    assert server["base_url"].startswith(f"https://{children['Service']['metadata']['name']}")
