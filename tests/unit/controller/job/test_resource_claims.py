"""GPUs by resource claims (resource.k8s.io): one claim a server and one for the learner, in place of `gpuResource`."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_controller.children.build import parse, static_children
from stage2_controller.job import names
from stage2_controller.job.settings import AdminPolicy
from stage2_controller.place.binding import REFUSED_S
from stage2_controller.plan.result import Plan
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import half, planned

Object = dict[str, Any]


def claiming(**spec: Any) -> Object:
    """A job of three servers whose GPUs are claimed."""
    written: Object = {
        "rollout": {"servers": 3, "resourceClaimTemplate": "one-gpu"},
        "learner": {"gpus": 1, "resourceClaimTemplate": "large-gpu"},
        "placement": {"mode": "Scheduler"},
    }
    return b.job(**{**written, **spec})


def pods(made: Plan) -> tuple[Object, Object]:
    servers, learner = (b.child(made, kind)["spec"]["template"]["spec"] for kind in ("Deployment", "Job"))
    return servers, learner


def test_servers_and_learner_use_one_resource_claim_each_instead_of_gpu_count() -> None:
    servers, learner = pods(b.planned(claiming()))
    assert servers["resourceClaims"] == [
        {"name": f"server-{index}", "resourceClaimTemplateName": "one-gpu"} for index in range(3)
    ]
    assert learner["resourceClaims"] == [{"name": "learner", "resourceClaimTemplateName": "large-gpu"}]
    for one in (*servers["containers"], *learner["containers"]):
        assert one["resources"] == {"claims": [{"name": one["name"]}]}
    (waiting,) = learner["initContainers"]
    assert waiting["resources"] == {}
    assert "podAffinity" in learner["affinity"]


def test_server_with_several_gpus_uses_single_claim() -> None:
    parallel = {"custom": {"extra": {"rollout_matching": {"vllm": {"tensor_parallel_size": 2}}}}}
    raw = claiming(rollout={"servers": 2, "gpusPerServer": 2, "resourceClaimTemplate": "two-gpus"}, config=parallel)
    servers, _ = pods(b.planned(raw))
    assert [one["resources"] for one in servers["containers"]] == [
        {"claims": [{"name": f"server-{index}"}]} for index in range(2)
    ]
    assert {one["resourceClaimTemplateName"] for one in servers["resourceClaims"]} == {"two-gpus"}
    assert "have 4 GPUs" in refusal(raw, AdminPolicy(largest_job={"*": 4})), "and servers and learner ask for 5"


def test_other_resources_are_kept_beside_claim() -> None:
    learner = {"gpus": 1, "resourceClaimTemplate": "large-gpu", "resources": {"requests": {"cpu": 8}}}
    _, pod = pods(b.planned(claiming(learner=learner)))
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": 8}, "claims": [{"name": "learner"}]}


def test_colocated_job_claims_gpus_for_learner() -> None:
    learner = {"gpus": 4, "resourceClaimTemplate": "four-gpus"}
    made = b.planned(claiming(rollout={"servers": 0}, learner=learner, config=b.COLOCATE))
    assert b.child(made, "Job")["spec"]["template"]["spec"]["resourceClaims"] == [
        {"name": "learner", "resourceClaimTemplateName": "four-gpus"}
    ]


def test_static_yaml_contains_same_claims() -> None:
    job = parse(claiming(), b.SETTINGS).job
    found = [one for one in static_children(job) if one["kind"] in ("Deployment", "Job")]
    claims = [one["spec"]["template"]["spec"]["resourceClaims"] for one in found]
    assert [len(one) for one in claims] == [3, 1]


def refusal(raw: Object, policy: AdminPolicy) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(raw, replace(b.SETTINGS, policy=policy))
    return str(refused.value)


def test_claim_template_not_allowed_by_admin_policy_is_refused() -> None:
    reported = refusal(claiming(), AdminPolicy(resource_claim_templates=("one-gpu",)))
    assert reported == (
        "spec.learner.resourceClaimTemplate: 'large-gpu'; this cluster lets jobs use as ResourceClaimTemplate only "
        "one-gpu; change or remove it, or ask the admin to add it to policy.resourceClaimTemplates of the chart"
    )


def test_claimed_gpus_count_for_largest_job_policy() -> None:
    assert parse(claiming(), replace(b.SETTINGS, policy=AdminPolicy(largest_job={"*": 4})))
    assert "have 3 GPUs" in refusal(claiming(), AdminPolicy(largest_job={"*": 3}))


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"spec": {"resourceClaims": [{"name": "x", "resourceClaimName": "others"}]}}, "resourceClaims"),
        ({"spec": {"resources": {"claims": [{"name": "learner"}]}}}, "resources.claims"),
        ({"spec": {"containers": [{"name": "learner", "resources": {"claims": []}}]}}, "containers[0].resources"),
        (
            {"spec": {"containers": [{"name": "mine", "resources": {"claims": [{"name": "learner"}]}}]}},
            "containers[0].resources.claims",
        ),
        (
            {"spec": {"initContainers": [{"name": "mine", "resources": {"claims": [{"name": "learner"}]}}]}},
            "initContainers[0].resources.claims",
        ),
    ],
    ids=["a claim of others", "of the whole pod", "taking it away", "sharing it", "sharing it first"],
)
def test_pod_template_may_not_change_claims(template: Object, path: str) -> None:
    learner = {"gpus": 1, "resourceClaimTemplate": "large-gpu", "template": template}
    reported = refusal(claiming(learner=learner), AdminPolicy())
    assert f"spec.learner.template.spec.{path}" in reported
    assert "use spec.rollout.resourceClaimTemplate and spec.learner.resourceClaimTemplate" in reported


def test_missing_claim_is_reported_with_its_template_name() -> None:
    raw = claiming()
    servers, _ = pods(b.planned(raw))
    waiting = b.pod(names.ROLE_ROLLOUT, node=None)
    waiting["spec"] = {**waiting["spec"], "resourceClaims": servers["resourceClaims"]}
    status = {"resourceClaimStatuses": [{"name": "server-0", "resourceClaimName": "x"}]}
    waiting["status"] = {**waiting["status"], **status, "containerStatuses": []}
    made = b.planned(raw, Observed(pods=(waiting,)))
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.UNSCHEDULABLE)
    assert b.message(made, reasons.ROLLOUT_READY) == (
        "the rollout pod waits for its claims: there are none yet from the ResourceClaimTemplate one-gpu, which must be"
        " in its namespace"
    )


def test_half_placed_claiming_job_prefers_other_nodes_afterwards() -> None:
    raw, account = claiming(), n.capacity(n.node(), n.node("z"))
    first = planned(raw, account)
    observed = half(b.created(first), "no devices")
    failed = planned(raw, account, observed, after_s=REFUSED_S).placement
    assert failed
    assert failed.refused == b.NODE
    after = replace(account.snapshot(n.KEY), refused=frozenset({b.NODE}))
    made = b.plan(raw, b.NOTHING, settings=b.SETTINGS, now=b.NOW, snapshot=after)
    servers, learner = pods(made)
    others = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [b.NODE]}]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": others}]}
    assert servers["affinity"] == {"nodeAffinity": preferred}
    assert learner["affinity"].keys() == {"podAffinity"}
    servers, _ = pods(planned(raw, account))
    assert "affinity" not in servers
