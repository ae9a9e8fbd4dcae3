"""A node that comes for a job that waits: the scheduler gives it to its two pods one after the other."""

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.observed import Observed
from stage2_controller.place.node_fit import Autoscaling
from stage2_controller.place.placement import REFUSED_FOR_S
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import NO_CLAIM, half, placed, planned, refused_pod

WAITED_S = 600


def test_what_refused_a_pod_before_the_other_got_its_node_says_nothing_of_that_node() -> None:
    raw, account, pool = b.job(), n.capacity(n.node("small", gpus=3)), Autoscaling("always")
    pending = planned(raw, account, autoscaling=pool)
    raw = b.told(raw, pending)
    account.put("Node", n.node())
    account.put("Pod", n.bound(names.ROLE_ROLLOUT, 3))
    children = Observed(deployment=b.child(pending, "Deployment"), learner=b.learner_job(pending))
    came = b.NOW + timedelta(seconds=WAITED_S)
    observed = half(children, "1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod affinity rules", came)
    made = planned(raw, account, observed, after_s=WAITED_S + 1, autoscaling=pool)
    assert (made.deletions, b.condition(made, reasons.PLACED)) == ((), ("True", reasons.NODE_CHOSEN))
    assert made.again_after_s == REFUSED_FOR_S
    late = planned(b.told(raw, made), account, observed, after_s=WAITED_S + 1 + REFUSED_FOR_S, autoscaling=pool)
    assert late.deletions == ("Job", "Deployment")
    assert b.condition(late, reasons.PLACED) == ("False", reasons.NODE_FULL)


def test_a_node_is_tried_from_when_the_volume_is_there_that_pods_waited_for() -> None:
    raw, account = b.job(), n.capacity(n.node(), n.node("z"))
    roles = (names.ROLE_ROLLOUT, names.ROLE_LEARNER)
    stands = replace(placed(raw, account), progress=None)
    waits = replace(stands, pods=tuple(refused_pod(role, NO_CLAIM) for role in roles))
    waiting = b.told(raw, planned(raw, account, waits, after_s=WAITED_S))
    tried = replace(stands, pods=tuple(map(refused_pod, roles)))
    made = planned(waiting, account, tried, after_s=WAITED_S + 1)
    assert (made.deletions, b.condition(made, reasons.PLACED)) == ((), ("True", reasons.NODE_CHOSEN))
    late = planned(b.told(raw, made), account, tried, after_s=WAITED_S + 1 + REFUSED_FOR_S)
    assert late.deletions == ("Job", "Deployment")


@pytest.mark.parametrize("time", [{}, {"lastTransitionTime": None}])
def test_a_refusal_of_a_scheduler_that_tells_no_time_counts_from_when_the_pod_was_made(time: Any) -> None:
    raw, account = b.job(), n.capacity(n.node())
    observed = placed(raw, account)
    pods = [copy.deepcopy(refused_pod(role)) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER)]
    for pod in pods:
        del pod["status"]["conditions"][0]["lastTransitionTime"]
        pod["status"]["conditions"][0] |= time
    refused = replace(observed, pods=tuple(pods), progress=None)
    early, late = (planned(raw, account, refused, after_s=REFUSED_FOR_S + more).placement for more in (-1, 0))
    assert early is not None
    assert late is not None
    assert (early.node, late.node) == (b.NODE, None)
