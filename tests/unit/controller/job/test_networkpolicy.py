"""Who reaches whom, in and out: a small evaluator of NetworkPolicy against every pair that matters."""

from collections.abc import Mapping
from typing import Any

import pytest

from stage2_controller.children import manifest
from stage2_controller.children.network import CONTROLLER_LABELS
from stage2_controller.job.settings import Settings
from tests.unit.controller import builders as b

Peer = tuple[str, Mapping[str, str]]  # namespace and labels
LEARNER: Peer = ("team-a", manifest.labels("job-3v1", "learner"))
SERVER: Peer = ("team-a", manifest.labels("job-3v1", "rollout"))
OTHER_LEARNER: Peer = ("team-a", manifest.labels("other", "learner"))
OTHER_SERVER: Peer = ("team-a", manifest.labels("other", "rollout"))
CONTROLLER: Peer = ("stage2-system", CONTROLLER_LABELS)
IMPOSTOR: Peer = ("team-a", CONTROLLER_LABELS)
CHOSEN = 38997  # by the kernel, as for a member of an NCCL group
NAMESAKE: Peer = ("team-b", manifest.labels("job-3v1", "learner"))


def allowed(policy: Mapping[str, Any], source: Peer, target: Peer, port: int) -> bool:
    """Whether the policy of the namespace team-a lets `source` reach this port of `target`."""
    if not matches(policy["spec"]["podSelector"], target[1]):
        return True  # the policy is not about this pod
    return any(
        any(item.get("port", port) == port for item in rule["ports"])
        and ("from" not in rule or any(peer_matches(peer, source) for peer in rule["from"]))
        for rule in policy["spec"]["ingress"]
    )


def lets_out(policy: Mapping[str, Any], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the policy of the namespace team-a lets `source`, a pod of the job, connect to this port of `target`."""
    assert matches(policy["spec"]["podSelector"], source[1])
    if "Egress" not in policy["spec"]["policyTypes"]:
        return True
    return any(
        any(item.get("port", port) == port and item["protocol"] == protocol for item in rule["ports"])
        and ("to" not in rule or any(peer_matches(peer, target) for peer in rule["to"]))
        for rule in policy["spec"]["egress"]
    )


def peer_matches(peer: Mapping[str, Any], source: Peer) -> bool:
    if "ipBlock" in peer:
        return False  # every peer here is a pod
    if "namespaceSelector" in peer:
        here = matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source[0]})
    else:
        here = source[0] == "team-a"
    return here and matches(peer.get("podSelector", {}), source[1])


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def policy(namespace: str | None = "stage2-system", transport: str = "auto", *, config: Any = None, **spec: Any) -> Any:
    settings = Settings(image="x", namespace=namespace)
    job = b.job(config=config, **spec)
    matching = job["spec"]["config"]["custom"].setdefault("extra", {}).setdefault("rollout_matching", {})
    matching.setdefault("vllm", {})["sync"] = {"transport": transport}
    return b.child(b.plan(job, b.NOTHING, settings=settings, now=b.NOW), "NetworkPolicy")


@pytest.mark.parametrize("transport", ["tcp", "nccl"])
def test_unnamed_ports_are_open_between_pods_only_for_nccl(transport: str) -> None:
    found = policy(transport=transport)
    for source, target, named in ((LEARNER, SERVER, 8001), (SERVER, LEARNER, 51217)):
        assert allowed(found, source, target, named)
        assert allowed(found, source, target, CHOSEN) is (transport == "nccl")


@pytest.mark.parametrize("port", [8000, 8001, 8002, CHOSEN])
def test_only_own_learner_reaches_servers(port: int) -> None:
    assert allowed(policy(), LEARNER, SERVER, port)
    for stranger in (OTHER_LEARNER, OTHER_SERVER, CONTROLLER, NAMESAKE):
        assert not allowed(policy(), stranger, SERVER, port)


@pytest.mark.parametrize("port", [51216, 51217, 51218, CHOSEN])
def test_only_own_servers_reach_transfer_ports_of_learner(port: int) -> None:
    assert allowed(policy(), SERVER, LEARNER, port)
    for stranger in (OTHER_LEARNER, OTHER_SERVER, CONTROLLER, IMPOSTOR):
        assert not allowed(policy(), stranger, LEARNER, port)


def test_only_controller_reaches_progress_port() -> None:
    assert allowed(policy(), CONTROLLER, LEARNER, 9400)
    for stranger in (OTHER_LEARNER, OTHER_SERVER, IMPOSTOR):
        assert not allowed(policy(), stranger, LEARNER, 9400)


def test_controller_outside_cluster_reaches_progress_port() -> None:
    assert allowed(policy(None), IMPOSTOR, LEARNER, 9400)
    assert not allowed(policy(None), IMPOSTOR, LEARNER, 51216)


def test_prometheus_scrapes_learner_from_any_namespace() -> None:
    prometheus: Peer = ("monitoring", {"app.kubernetes.io/name": "prometheus"})
    assert allowed(policy(), prometheus, LEARNER, 9401)
    assert not allowed(policy(), prometheus, LEARNER, 9400)


def test_other_server_ports_are_closed_to_everyone_else() -> None:
    for stranger in (OTHER_LEARNER, OTHER_SERVER, CONTROLLER, NAMESAKE):
        assert not any(allowed(policy(), stranger, SERVER, port) for port in (22, 7999, 8003))


@pytest.mark.parametrize("transport", ["tcp", "nccl"])
def test_pods_connect_only_to_pods_of_same_job(transport: str) -> None:
    found = policy(transport=transport)
    for source, target, named in ((LEARNER, SERVER, 8001), (SERVER, LEARNER, 51217)):
        assert lets_out(found, source, target, named)
        assert lets_out(found, source, target, CHOSEN) is (transport == "nccl")
        for stranger in (OTHER_LEARNER, OTHER_SERVER, CONTROLLER, NAMESAKE):
            assert not any(lets_out(found, source, stranger, port) for port in (named, CHOSEN, 22, 443))


def test_dns_is_allowed_to_any_name_server_of_cluster() -> None:
    name_server: Peer = ("kube-system", {"k8s-app": "kube-dns"})
    assert {"ipBlock": {"cidr": "169.254.0.0/16"}} in policy()["spec"]["egress"][-1]["to"], "one on the node itself"
    for found in (policy(), policy(rollout={"servers": 0}, config=b.COLOCATE)):
        assert all(lets_out(found, LEARNER, name_server, 53, protocol) for protocol in ("UDP", "TCP"))
        assert not lets_out(found, LEARNER, name_server, 443)


ELSEWHERE = ("outside", {"of": "no cluster"})
BESIDE: dict[str, Any] = {"spec": {"containers": [{"name": "uploads", "image": "rclone"}]}}


def learner(**spec: Any) -> dict[str, Any]:
    return {"learner": {"gpus": 1, "template": {"spec": spec}}}


NEEDS_OTHERS: dict[str, dict[str, Any]] = {
    "a hub's model": {"config": {"model": {"model": "Qwen/Qwen3-VL-8B-Instruct"}}},
    "a tracker": {"config": {"training": {"report_to": ["tensorboard", "wandb"]}}},
    "a container before": learner(initContainers=[{"name": "fetch", "image": "rclone"}]),
    "a container beside": {"rollout": {"servers": 3, "template": BESIDE}},
}
NEEDS_NOBODY: dict[str, dict[str, Any]] = {
    "TensorBoard": {"config": {"training": {"report_to": ["tensorboard", "none"]}}},
    "the learner's container": learner(containers=[{"name": "learner", "env": []}]),
    "a server's": {"rollout": {"servers": 3, "template": {"spec": {"containers": [{"name": "server-1", "env": []}]}}}},
    "the one that waits": learner(initContainers=[{"name": "wait-for-servers"}]),
    "a folder": {"config": {"model": {"model": "./model"}}},
}


@pytest.mark.parametrize("spec", NEEDS_OTHERS.values(), ids=NEEDS_OTHERS)
def test_job_that_needs_external_hosts_has_open_egress_unless_closed(spec: dict[str, Any]) -> None:
    assert lets_out(policy(**spec), LEARNER, ELSEWHERE, 443)
    assert not lets_out(policy(network={"egress": "Closed"}, **spec), LEARNER, ELSEWHERE, 443)


@pytest.mark.parametrize("spec", NEEDS_NOBODY.values(), ids=NEEDS_NOBODY)
def test_job_without_external_needs_has_closed_egress_unless_opened(spec: dict[str, Any]) -> None:
    assert not lets_out(policy(**spec), LEARNER, ELSEWHERE, 443)
    assert lets_out(policy(network={"egress": "Open"}, **spec), LEARNER, ELSEWHERE, 443)
