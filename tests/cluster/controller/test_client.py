"""`stage2.Job` on a real API server, held to what it does on that of the unit tests."""

from pathlib import Path

import pytest

from stage2 import Job, RequestRefused
from tests.cluster.controller.conftest import Controller, Kubectl, eventually, job
from tests.unit.cli import client_contract

FILE = Path(__file__).parents[3] / "examples" / "job-3v1-tiny.yaml"


@pytest.fixture(autouse=True)
def of_the_test(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client finds the cluster of the test."""
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))


def test_client_keeps_contract_against_real_api_server(kubectl: Kubectl) -> None:
    client_contract.a_job_is_submitted_listed_suspended_resumed_and_deleted(FILE, kubectl.namespace)
    client_contract.names_lead_to_no_other_object(kubectl.namespace)


def test_client_raises_message_of_api_server(kubectl: Kubectl) -> None:
    kubectl.apply(job())
    with pytest.raises(RequestRefused, match=r"cannot get resource .*rolloutmatchingjobs"):
        Job("job-3v1", kubectl.namespace, user="stranger").status()
    with pytest.raises(RequestRefused, match="servers"):
        Job("job-3v1", kubectl.namespace)._merge({"spec": {"rollout": {"servers": -1}}})


def test_client_reads_status_and_events_written_by_controller(kubectl: Kubectl, controller: Controller) -> None:
    kubectl.apply(job())
    ours = Job("job-3v1", kubectl.namespace)
    eventually(lambda: ours.status().phase == "Pending", why="no node fits")
    eventually(lambda: ours.events(), why="the controller reports it")
    assert all(event.reason and event.at for event in ours.events())
