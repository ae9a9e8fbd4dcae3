"""What a pod asks of its node: the figures are those of Kubernetes' own sum; the real scheduler confirms them in
tests/cluster/controller/test_sums.py.
"""

from typing import Any

import pytest

from stage2_controller.place.pod_requests import requests

GPU = "nvidia.com/gpu"
SIDECAR = {"restartPolicy": "Always"}


def container(name: str = "x", **amounts: str) -> dict[str, Any]:
    return {"name": name, "resources": {"requests": amounts}}


TWO = [container(cpu="1"), container("y", cpu="500m")]
SIDE, GREEDY = {**container("side", cpu="1"), **SIDECAR}, container("greedy", cpu="4")
INITS: list[tuple[str, float, list[Any]]] = [
    ("none", 1.5, []),
    ("a greedy one", 4, [GREEDY]),
    ("a sidecar", 2.5, [SIDE]),
    ("a sidecar before a greedy one", 5, [SIDE, GREEDY]),
    ("a greedy one before a sidecar", 4, [GREEDY, SIDE]),
    ("a greedy one between two sidecars", 5, [SIDE, GREEDY, {**SIDE, "name": "other"}]),
    ("two greedy ones", 4, [GREEDY, container("less", cpu="3")]),
]


@pytest.mark.parametrize(("cpu", "inits"), [row[1:] for row in INITS], ids=[row[0] for row in INITS])
def test_containers_run_beside_all_sidecars_and_an_init_container_beside_those_before_it(
    cpu: float, inits: list[Any]
) -> None:
    assert requests({"containers": TWO, "initContainers": inits}) == {"cpu": cpu, "pods": 1}
    boxed = {"containers": TWO, "initContainers": inits, "overhead": {"cpu": "250m"}}
    assert requests(boxed) == {"cpu": cpu + 0.25, "pods": 1}


def test_a_negative_amount_makes_no_room_of_what_others_ask_for() -> None:
    """The API server refuses such a pod; the sum of a job goes by its template before that."""
    spec = {"containers": [{"resources": {"limits": {GPU: "16"}}}, {"resources": {"limits": {GPU: "-100"}}}]}
    assert requests(spec) == {GPU: 16, "pods": 1}


def test_a_limit_stands_for_a_request_that_is_not_written() -> None:
    spec = {"containers": [{"resources": {"limits": {"cpu": "2", GPU: "1"}, "requests": {"cpu": "1"}}}]}
    assert requests(spec) == {"cpu": 1, GPU: 1, "pods": 1}


def test_what_a_pod_asks_for_as_a_whole_counts_in_place_of_its_containers() -> None:
    containers = [{"resources": {"limits": {GPU: "1"}, "requests": {"cpu": "1"}}}, {"resources": {}}]
    spec = {"containers": containers, "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "1Gi"}}}
    assert requests({**spec, "overhead": {"cpu": "500m"}}) == {"cpu": 8.5, "memory": 2**30, GPU: 1, "pods": 1}


def test_a_limit_of_the_whole_pod_is_a_request_only_of_what_no_container_asks_for_and_of_huge_pages() -> None:
    limits = {"cpu": "40", "memory": "1Gi", "hugepages-2Mi": "8Mi", GPU: "9"}
    containers = [container(cpu="4", **{"hugepages-2Mi": "4Mi"}), {"name": "bare"}]
    found = requests({"containers": containers, "resources": {"limits": limits}})
    assert found == {"cpu": 4, "memory": 2**30, "hugepages-2Mi": 8 * 2**20, "pods": 1}


def status(*, pending: str = "", of: str = "containerStatuses", **held: str) -> dict[str, Any]:
    told = [{"type": "PodResizePending", "status": "True", "reason": pending}] if pending else []
    return {"conditions": told, of: [{"name": "x", "resources": {"requests": held}, "allocatedResources": held}]}


RESIZED: list[tuple[str, float, str, dict[str, Any]]] = [
    ("as it was", 2, "2", status(cpu="2")),
    ("not smaller yet", 10, "2", status(cpu="10")),
    ("not larger yet", 12, "12", status(cpu="1", pending="Deferred")),
    ("never larger", 1, "100", status(cpu="1", pending="Infeasible")),
    ("of another name", 2, "2", {"containerStatuses": [{"name": "z", "resources": {"requests": {"cpu": "9"}}}]}),
    ("without a word on it", 2, "2", {"containerStatuses": [{"name": "x"}]}),
]


@pytest.mark.parametrize(("cpu", "written", "told"), [row[1:] for row in RESIZED], ids=[row[0] for row in RESIZED])
def test_a_container_that_is_resized_counts_for_what_it_is_to_have_and_for_what_it_still_holds(
    cpu: float, written: str, told: dict[str, Any]
) -> None:
    assert requests({"containers": [container(cpu=written)]}, told) == {"cpu": cpu, "pods": 1}


def test_so_does_a_sidecar_and_no_init_container() -> None:
    told = status(of="initContainerStatuses", cpu="10")
    spec = {"containers": [container("y", cpu="1")], "initContainers": [container(cpu="2")]}
    assert requests(spec, told) == {"cpu": 2, "pods": 1}
    beside = {**spec, "initContainers": [{**container(cpu="2"), **SIDECAR}]}
    assert requests(beside, told) == {"cpu": 11, "pods": 1}
