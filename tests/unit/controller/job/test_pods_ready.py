"""PodsReady of a Workload, by whose reason and time Kueue ends what does not start or does not recover."""

from typing import Any

import pytest

from stage2_controller.observed import Observed
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import ADMITTED, condition, queued, told, workload
from tests.unit.controller.place.test_old_learner import ending
from tests.unit.controller.place.test_placement import planned

RECOVERS = condition("PodsReady", "False", reason="WaitForRecovery")
WAITS = (condition("QuotaReserved", "False"), condition("Admitted", "False"))


@pytest.mark.parametrize(
    "found",
    [
        pytest.param((*ADMITTED, RECOVERS, condition("Evicted", reason="PodsReadyTimeout")), id="evicted"),
        pytest.param((*WAITS, RECOVERS), id="in the queue"),
    ],
)
def test_an_evicted_job_that_did_not_recover_waits_for_its_start_again(found: Any) -> None:
    """Else Kueue counts its recoveryTimeout from before the eviction, and evicts the job as soon as it is admitted."""
    made = planned(queued(), n.capacity(n.node()), Observed(workload=workload(*found)), after_s=600)
    assert told(made)["PodsReady"] == ("False", "WaitForStart")


def test_one_that_waits_for_its_start_is_not_told_so_again() -> None:
    found = workload(*WAITS, condition("PodsReady", "False", reason="WaitForStart"))
    assert planned(queued(), n.capacity(n.node()), Observed(workload=found)).workload_patch is None


def test_quota_goes_back_though_a_finalizer_of_others_keeps_a_pod_that_has_ended() -> None:
    kept = ending(b.pod(names.ROLE_LEARNER, b.down("learner", 0), name="kept", phase="Succeeded"))
    found = workload(*ADMITTED, condition("Evicted", message="preempted"))
    made = planned(queued(), n.capacity(n.node()), Observed(workload=found, pods=(kept,)))
    assert told(made)["QuotaReserved"] == ("False", "Pending")
