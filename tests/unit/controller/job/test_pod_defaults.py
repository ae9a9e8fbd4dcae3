"""What the API server adds to a job's pods counts when their node is chosen."""

from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.place import pod_requests
from stage2_controller.place.pod_defaults import (
    PodDefaults,
    default_of,
    default_requests,
    priority_classes,
    runtime_classes,
)
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import planned


def limit_range(*items: Any) -> Any:
    return {"metadata": {"name": "x"}, "spec": {"limits": list(items)}}


def test_of_several_limit_ranges_the_most_of_each_resource_counts() -> None:
    ranges = [
        limit_range({"type": "Pod", "max": {"cpu": "1"}}, {"type": "Container", "defaultRequest": {"cpu": "500m"}}),
        limit_range({"type": "Container", "defaultRequest": {"cpu": "9", "memory": "1Gi"}}),
        {"metadata": {"name": "empty"}, "spec": {}},
    ]
    assert default_requests(ranges) == {"cpu": 9, "memory": 2**30}


def test_a_container_gets_of_the_defaults_what_it_does_not_ask_for() -> None:
    asks = {"name": "asks", "resources": {"limits": {"cpu": "4"}}}
    spec = {"containers": [asks, {"name": "asks nothing"}], "initContainers": [{"name": "first"}]}
    found = pod_requests.requests(spec, defaults={"cpu": 1.0, "memory": 8.0}, overhead={"memory": 5.0})
    assert found == {"cpu": 5.0, "memory": 21.0, "pods": 1}


def test_a_pod_that_was_taken_has_its_own_overhead() -> None:
    spec = {"containers": [], "overhead": {"memory": "7"}}
    assert pod_requests.requests(spec, overhead={"memory": 5.0})["memory"] == 7


@pytest.mark.parametrize(
    ("defaults", "fits"),
    [
        (PodDefaults(), True),
        (PodDefaults(requests={"cpu": 6.0}), True),
        (PodDefaults(requests={"cpu": 9.0}), False),  # three servers and a learner, on 32 cores
        (PodDefaults(runtime_classes={"kata": {"overhead": {"podFixed": {"cpu": "17"}}}}), False),
        (PodDefaults(runtime_classes={"other": {"overhead": {"podFixed": {"cpu": "17"}}}}), True),
    ],
)
def test_a_node_is_chosen_that_has_room_for_what_is_added(defaults: PodDefaults, fits: bool) -> None:
    template = {"spec": {"runtimeClassName": "kata"}}
    raw = b.job(rollout={"servers": 3, "template": template}, learner={"gpus": 1, "template": template})
    made = planned(raw, n.capacity(n.node()), defaults=defaults)
    assert made.placement
    assert (made.placement.node == b.NODE) is fits
    if not fits:
        assert "cpu" in b.message(made, reasons.PLACED)


def test_a_runtime_class_says_where_its_pods_may_run() -> None:
    sandboxed = {"key": "sandbox", "value": "kata", "effect": "NoSchedule"}
    scheduling = {"nodeSelector": {"sandbox": "kata"}, "tolerations": [sandboxed]}
    template = {"spec": {"runtimeClassName": "kata"}}
    raw = b.job(rollout={"servers": 3, "template": template}, learner={"gpus": 1, "template": template})
    account = n.capacity(n.node(), n.node("boxed", labels={"sandbox": "kata"}, taints=[sandboxed]))
    defaults = PodDefaults(runtime_classes={"kata": {"scheduling": scheduling}})
    made = planned(raw, account, defaults=defaults)
    assert made.placement
    assert made.placement.node == "boxed"


@pytest.mark.parametrize(("of_learner", "priority"), [("high", 9), ("low", -3), ("", 5)])
def test_the_least_priority_of_a_jobs_pods_counts(of_learner: str, priority: int) -> None:
    template = {"spec": {"priorityClassName": of_learner}} if of_learner else {}
    raw = b.job(
        rollout={"servers": 3, "template": {"spec": {"priorityClassName": "high"}}},
        learner={"gpus": 1, "template": template},
    )
    classes = {"high": {"value": 9}, "low": {"value": -3}}
    defaults = PodDefaults(priority_classes=classes, default_class={"value": 5})
    made = planned(raw, n.capacity(n.node()), defaults=defaults)
    assert made.placement
    assert made.placement.need.priority == priority


def test_a_pod_that_names_no_class_has_the_priority_0_beside_one_that_does() -> None:
    """Servers of a high priority evicted strangers for a job whose learner could never follow them."""
    template = {"spec": {"priorityClassName": "high"}}
    raw = b.job(rollout={"servers": 3, "gpusPerServer": 1, "port": 8000, "template": template})
    defaults = PodDefaults(priority_classes={"high": {"metadata": {"name": "high"}, "value": 1000}})
    made = planned(raw, n.capacity(n.node(), n.foreign(gpus=4, priority=500)), defaults=defaults)
    assert made.placement is not None
    assert (made.placement.node, made.placement.need.priority) == (None, 0)


def test_what_is_kept_of_a_need_holds_no_pod_specs() -> None:
    made = planned(b.job(), n.capacity(n.node()))
    assert made.placement
    assert [pod.spec for pod in made.placement.need.pods] == [{}, {}]


def test_the_least_of_several_default_priorities_counts() -> None:
    classes = [{"value": 9, "globalDefault": True}, {"value": 3, "globalDefault": True}, {"value": 1}]
    assert default_of(classes) == classes[1]
    assert default_of(classes[2:]) is None


def test_templates_of_any_shape_name_runtime_classes_or_none() -> None:
    spec = {"rollout": {"template": {"spec": {"runtimeClassName": "kata"}}}, "learner": {"template": {"spec": []}}}
    assert runtime_classes(spec) == {"kata"}
    assert priority_classes({**spec, "placement": {"priorityClassName": "high"}}) == {"high"}
    assert priority_classes({"placement": []}) == set()
    assert runtime_classes({"rollout": None, "learner": {"template": {"spec": {"runtimeClassName": 7}}}}) == set()


@pytest.mark.parametrize("text", ["../../../../api/v1/pods?a=1", "..", "a/b", "a?watch=true", "A", "a\n", "a" * 254])
def test_a_text_that_can_be_no_name_is_asked_for_nowhere(text: str) -> None:
    """It would become a part of the path of a request that the controller makes with its own rights."""
    template = {"template": {"spec": {"priorityClassName": text, "runtimeClassName": text}}}
    assert priority_classes({"learner": template, "placement": {"priorityClassName": text}}) == set()
    assert runtime_classes({"rollout": template}) == set()
