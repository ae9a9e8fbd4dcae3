"""One plan, three executors: local processes, static YAML and the controller start the same containers.

The golden file shows the whole plan of an example. After an intended change, write it anew:
`python -m tests.unit.controller.job.test_one_plan` writes it.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.job import RolloutMatchingJob
from stage2_api.parsing import parse_job
from stage2_api.pod import layout
from stage2_controller.children.build import static_children
from stage2_controller.job import names
from stage2_controller.job.containers import containers
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import planned

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def children() -> dict[str, Any]:
    """The children of the example of GRPO, by their kinds."""
    job = parse_job(yaml.safe_load((ROOT / "examples" / "job-grpo-6v2.yaml").read_text()))
    return {child["kind"]: child for child in static_children(job)}


def test_example_job_runs_server_on_six_gpus_and_two_learner_processes(children: dict[str, Any]) -> None:
    (server,) = children["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["command"][:2] == ["stage2", "serve"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "6"
    assert [port["containerPort"] for port in server["ports"]] == [8080]
    (learner,) = children["Job"]["spec"]["template"]["spec"]["containers"]
    assert learner["command"][:2] == ["stage2", "learn"]
    assert "--processes=2" in learner["command"]
    assert learner["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_run_config_points_to_server_address_of_job(children: dict[str, Any]) -> None:
    config = yaml.safe_load(children["ConfigMap"]["data"]["config.yaml"])
    (server,) = config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"]
    assert server["base_url"].endswith(":8080")
    assert server["base_url"].startswith(f"https://{children['Service']['metadata']['name']}")


GOLDEN = Path(__file__).parents[1] / "golden.yaml"
EXAMPLES = sorted(ROOT.glob("examples/**/job*.yaml"))
ON_ONE_NODE = [path for path in EXAMPLES if path.name != "job-jobset.yaml"]
IMAGE = b.SETTINGS.image


def raw(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    metadata = {"namespace": "team-a", "uid": "u", "generation": 1, "resourceVersion": "1", **made["metadata"]}
    return {**made, "metadata": metadata}


def static(job: RolloutMatchingJob) -> dict[str, Any]:
    return {
        item["kind"]: item
        for item in static_children(job, image=IMAGE, content=b.new_credentials({"rollout": ()}, b.NOW))
    }


def controlled(job: dict[str, Any]) -> dict[str, Any]:
    """What the controller creates once all servers answer."""
    account = n.capacity(n.node(gpus=64, has={"stage2.dev/fake-gpu": "64"}))
    first = planned(job, account)
    servers = [c["name"] for item in first.children if item["kind"] == "Deployment" for c in _containers(item)]
    pod = b.pod(names.ROLE_ROLLOUT, *(b.up(name) for name in servers))
    made = planned(job, account, Observed(secret=b.secret(), pods=(pod,) if servers else ()))
    return {item["kind"]: item for item in (*first.children, *made.children)}


def _containers(manifest: Any) -> list[Any]:
    found: list[Any] = manifest["spec"]["template"]["spec"]["containers"]
    return found


def without_what_only_a_controller_adds(manifest: Any) -> Any:
    spec = copy.deepcopy(manifest["spec"])
    if manifest["kind"] == "Service":
        spec["selector"].pop(names.LABEL_ATTEMPT, None)
    jobs = [one["template"]["spec"] for one in spec.get("replicatedJobs", ())]
    for template in [one["template"] for one in (spec, *jobs) if "template" in one]:
        template["spec"].pop("affinity", None)
        template["metadata"]["labels"].pop(names.LABEL_ATTEMPT, None)
        for mark in (names.ANNOTATION_JOB_UID, names.ANNOTATION_SPEC_HASH):
            template["metadata"]["annotations"].pop(mark, None)
    return spec


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_static_yaml_and_controller_create_same_children(path: Path) -> None:
    job = raw(path)
    written, made = static(parse_job(job)), controlled(job)
    assert set(written) == set(made)
    for kind in set(written) & {"Deployment", "Job", "JobSet", "Service", "NetworkPolicy"}:
        assert without_what_only_a_controller_adds(written[kind]) == without_what_only_a_controller_adds(made[kind])
    assert written["ConfigMap"]["data"] == made["ConfigMap"]["data"]
    assert "ownerReferences" not in written["ConfigMap"]["metadata"]


@pytest.mark.parametrize("path", ON_ONE_NODE, ids=[path.name for path in ON_ONE_NODE])
def test_local_processes_match_pod_containers(path: Path) -> None:
    job = parse_job(raw(path))
    host = names.service_host(job.metadata.name, "team-a")
    local = containers(job, host_for=lambda _: host, tls=True)
    written = static(job)
    pods = [item for kind in ("Deployment", "Job") if kind in written for item in _containers(written[kind])]
    assert [item["name"] for item in pods] == [process.name for process in (*local.servers, local.learner)]
    for process, container in zip((*local.servers, local.learner), pods, strict=True):
        assert list(process.command) == [word for word in container["command"] if not word.startswith("--restarts=")]
        assert {item["name"]: item["containerPort"] for item in container["ports"]} == process.ports
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert process.env.items() <= env.items()
    assert written["ConfigMap"]["data"][layout.CONFIG_KEY] == local.config_text


def test_example_plan_matches_golden_file() -> None:
    assert list(yaml.safe_load_all(GOLDEN.read_text(encoding="utf-8"))) == golden()


def golden() -> list[dict[str, Any]]:
    """The children of the example, with a Secret whose content everybody knows, and the JobSet of another."""
    content = {"token": "t0ken", "ca.crt": "authority", "rollout.crt": "certificate", "rollout.key": "key"}
    first = static_children(parse_job(raw(ROOT / "examples" / "job-3v1.yaml")), image=IMAGE, content=content)
    return [*first, static(parse_job(raw(ROOT / "examples" / "job-jobset.yaml")))["JobSet"]]


if __name__ == "__main__":
    GOLDEN.write_text(yaml.safe_dump_all(golden(), sort_keys=False, allow_unicode=True), encoding="utf-8")
