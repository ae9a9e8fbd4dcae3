"""Passes that put servers behind their Service: one request for each address, and a refusal that is reported."""

from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.spec import names
from stage2_controller.work_queue import RetryLater
from tests.unit.controller.fake_server import KEY, Life
from tests.unit.controller.job.test_service_members import OURS, SERVERS, replica_set, server_pod
from tests.unit.controller.loop.test_reconcile import life as life  # a fixture

SLICE = ("EndpointSlice", SERVERS)


def as_told(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a watch tells of an object that others made for the job."""
    worn = {"labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY, **body["metadata"].get("labels", {})}}
    noted = {"annotations": {names.ANNOTATION_JOB: KEY.name, **body["metadata"].get("annotations", {})}}
    return {**body, "kind": kind, "metadata": {**body["metadata"], **worn, **noted}}


async def begun(life: Life) -> None:
    """Bring the job as far as its rollout pod has an address."""
    await life.one_pass()
    service = life.server.objects["Service", "job-3v1-rollout"]
    spec = {key: value for key, value in service["spec"].items() if key != "selector"}
    life.server.add({**service, "spec": {**spec, "ipFamilies": ["IPv4"]}})
    uid = life.server.objects["Deployment", "job-3v1-rollout"]["metadata"]["uid"]
    life.server.add(as_told("ReplicaSet", replica_set("uid-of-set", deployment=uid)))
    life.server.add(as_told("Pod", server_pod()))
    life.server.requests.clear()


async def test_a_server_that_has_an_address_costs_one_request(life: Life) -> None:
    await begun(life)
    await life.one_pass()
    assert [one for one in life.server.requests if one != ("apply", "status")] == [("apply", "EndpointSlice")]
    assert life.server.objects[SLICE]["endpoints"][0]["addresses"] == [OURS]
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == []


async def test_a_slice_that_somebody_deletes_comes_back(life: Life) -> None:
    await begun(life)
    await life.one_pass()
    life.server.remove(*SLICE)
    await life.one_pass()
    assert SLICE in life.server.objects


async def test_a_controller_that_may_not_write_addresses_says_so(life: Life) -> None:
    await begun(life)
    life.server.refused["EndpointSlice"] = "endpointslices are forbidden"
    with pytest.raises(RetryLater, match="endpointslices are forbidden"):
        await life.one_pass()
    assert life.children_applied() == ("False", reasons.CHILD_REFUSED)
    life.server.refused.clear()
    await life.one_pass()
    assert life.children_applied() == ("True", reasons.APPLIED)
