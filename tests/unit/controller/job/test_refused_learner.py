"""A learner's pod that the API server refuses: its Job says nothing, an event does, and the job has its sentence."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.place.binding import UNMADE_S
from stage2_controller.place.capacity import Capacity
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import planned

WORDS = 'Error creating: pods "job-3v1-learner-x" is forbidden: exceeded quota: gpus'


def refused(mode: str = "Reserve", *, servers: str | None = None) -> tuple[Any, Capacity, Observed]:
    """A job, an account of its node, and what is observed while its learner's pod is refused."""
    raw, account = b.job(placement={"mode": mode}), n.capacity(n.node())
    made = planned(raw, account)
    learner = b.learner_job(made)
    learner["metadata"] = {**learner["metadata"], "creationTimestamp": timestamp(b.NOW)}
    told = {"type": "PodScheduled", "status": "True" if servers else "False", "lastTransitionTime": timestamp(b.NOW)}
    pods = (b.pod(names.ROLE_ROLLOUT, node=servers, conditions=[told]),)
    return raw, account, Observed(deployment=b.child(made, "Deployment"), learner=learner, pods=pods)


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_its_sentence_is_told_of_the_learner(mode: str) -> None:
    raw, account, observed = refused(mode)
    before = planned(raw, account, observed, after_s=UNMADE_S)
    assert b.condition(before, reasons.LEARNER_RUNNING) == ("False", reasons.NOT_CREATED)
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.POD_REFUSED)
    assert b.message(made, reasons.LEARNER_RUNNING) == f"the API server refuses the learner's pod: {WORDS}"


def test_another_node_would_not_help_and_nothing_moves() -> None:
    raw, account, observed = refused()
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert (b.condition(made, reasons.PLACED), made.deletions) == (("False", reasons.POD_REFUSED), ())
    assert made.status["message"] == WORDS


def test_half_of_a_job_gives_its_node_back_with_the_reason() -> None:
    raw, account, observed = refused(servers=b.NODE)
    raw = b.told(raw, planned(raw, account, observed))
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    assert WORDS in b.message(made, reasons.PLACED)
    assert made.deletions == ("Job", "Deployment")


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_a_pass_comes_when_the_events_tell_and_again_a_minute_later(mode: str) -> None:
    raw, account, observed = refused(mode)
    assert planned(raw, account, observed, after_s=UNMADE_S - 7).again_after_s == 7
    assert planned(raw, account, observed, after_s=UNMADE_S).again_after_s == UNMADE_S
