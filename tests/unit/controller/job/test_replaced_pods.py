"""What pods that are gone have said counts for nothing: not their steps, not their loss, not the weights they held."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stage2_api.job_status import JobStatus
from stage2_api.pod.report import LearnerReport, SyncStatus
from stage2_controller.job import names
from stage2_controller.plan.result import Plan
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b

LOADING = LearnerReport(phase="loading", restarts=1, sync=SyncStatus())
GONE = b.ended(143)
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. "}


def trained() -> b.Object:
    """A job that trains, and has done four steps."""
    return b.with_status(b.job(), b.planned(b.job(), b.started(b.job())))


def another(pod: b.Object, number: int = 2) -> b.Object:
    """The pod that follows one."""
    metadata = pod["metadata"]
    return {
        **pod,
        "metadata": {**metadata, "uid": f"{metadata['uid']}-{number}", "name": f"{metadata['name']}{number}"},
    }


def leaving(pod: b.Object) -> b.Object:
    """The pod once somebody has deleted it."""
    deleted = {"deletionTimestamp": conditions.timestamp(b.NOW), "deletionGracePeriodSeconds": 30}
    return {**pod, "metadata": {**pod["metadata"], **deleted}}


def servers(*, ready: bool = True) -> b.Object:
    return b.rollout_pod(ready, ready, ready)


def weights(made: Plan) -> tuple[str, str] | None:
    return b.condition(made, reasons.WEIGHTS_IN_SYNC)


def told(made: Plan) -> explanation.Step:
    return explanation.first(explanation.chain({**b.job(), "status": made.status}))


# What is seen of the rollout pod after the one that held version 4 is gone, in order.
ROLLOUT_PODS: dict[str, list[tuple[b.Object, ...]]] = {
    "deleted": [(leaving(servers()),), (), (another(servers(ready=False)),), (another(servers()),)],
    "replaced between two passes": [(another(servers()),)],
    "evicted": [
        ({**servers(), "status": {**servers()["status"], **EVICTED}}, another(servers(ready=False))),
        (another(servers()),),
    ],
    "gone for long": [(), (), (another(servers()),)],
    "replaced twice": [(another(servers()),), (another(servers(), 3),)],
}


@pytest.mark.parametrize("way", ROLLOUT_PODS)
def test_servers_in_new_pod_hold_no_weights_until_next_push(way: str) -> None:
    raw, seen = trained(), b.started(b.job(), baseline=b.report())
    for pods in ROLLOUT_PODS[way]:
        made = b.planned(raw, replace(seen, pods=(*pods, b.learner_pod())))
        if not any("deletionTimestamp" in pod["metadata"] for pod in pods):
            assert weights(made) == ("False", reasons.SERVER_RESTARTED), pods
            assert not any("version" in one or one["ready"] for one in made.status["servers"])
            assert told(made).reason != reasons.TRAINS
            assert b.condition(made, reasons.TRAINING) != ("True", reasons.TRAINS)
        JobStatus.model_validate(made.status)
        raw = b.with_status(raw, made)
    pushed = replace(seen, pods=(*pods, b.learner_pod()), progress=b.report(5, pushed=5, held=(5, 5, 5)))
    assert weights(b.planned(raw, pushed)) == ("True", reasons.SAME_VERSION)


def test_repeated_push_of_same_step_counts_for_new_servers() -> None:
    """A learner that finds a server empty pushes what it pushed before, and the step goes on for minutes."""
    raw, seen = trained(), b.started(b.job(), baseline=b.report())
    pods = (another(servers()), b.learner_pod())
    raw = b.with_status(raw, b.planned(raw, replace(seen, pods=pods)))
    sync = b.report().sync
    assert sync is not None
    again = b.report(sync=sync.model_copy(update={"pushes": 6}))
    assert weights(b.planned(raw, replace(seen, pods=pods, progress=again))) == ("True", reasons.SAME_VERSION)


def test_push_that_may_predate_new_pod_does_not_count() -> None:
    """Both are news: the push may have gone to the pod before, as whoever trains fast is asked every few seconds."""
    raw, seen = trained(), b.started(b.job())
    pods = (another(servers()), b.learner_pod())
    late = b.report(5, pushed=5, held=(5, 5, 5))
    for baseline, progress in ((None, b.report()), (None, late), (late, late), (late, late)):
        made = b.planned(raw, replace(seen, pods=pods, progress=progress, baseline=baseline))
        assert weights(made) == ("False", reasons.SERVER_RESTARTED)
        raw = b.with_status(raw, made)
    pushed = b.report(6, pushed=6, held=(6, 6, 6))
    made = b.planned(raw, replace(seen, pods=pods, progress=pushed, baseline=late))
    assert weights(made) == ("True", reasons.SAME_VERSION)


DEAD = {
    "ended": b.down("server-0", 137),
    "is not started again yet": b.waiting("server-0", "CrashLoopBackOff"),
    "is started for the first time": b.waiting("server-0", "ContainerCreating"),
}


@pytest.mark.parametrize("how", DEAD)
def test_stopped_server_holds_no_weights(how: str) -> None:
    """Its container restarts in ten seconds at the earliest, and in five minutes where it crashes again and again."""
    others = [b.up("server-1"), b.up("server-2")]
    pods = (b.pod(names.ROLE_ROLLOUT, DEAD[how], *others), b.learner_pod())
    made = b.planned(trained(), b.started(b.job(), pods=pods))
    assert weights(made) == ("False", reasons.SERVER_RESTARTED)
    assert "server-0 holds no weights" in b.message(made, reasons.WEIGHTS_IN_SYNC)


def test_restarted_controller_trusts_weights_in_status() -> None:
    raw, seen = trained(), b.started(b.job())
    assert weights(b.planned(raw, replace(seen, progress=None, baseline=None))) == ("True", reasons.SAME_VERSION)
    assert weights(b.planned(raw, replace(seen, baseline=b.report()))) == ("True", reasons.SAME_VERSION)


@pytest.mark.parametrize("restarts", [0, 1])
def test_server_restarted_inside_its_pod_holds_no_weights(restarts: int) -> None:
    old = b.pod(names.ROLE_ROLLOUT, *(b.up(f"server-{index}", restarts=restarts) for index in range(3)))
    new = b.pod(names.ROLE_ROLLOUT, b.up("server-0", restarts=restarts + 1), *old["status"]["containerStatuses"][1:])
    raw, seen = b.job(), b.started(b.job(), pods=(old, b.learner_pod()))
    raw = b.with_status(raw, b.planned(raw, seen))
    assert weights(b.planned(raw, seen)) == ("True", reasons.SAME_VERSION)
    made = b.planned(raw, replace(seen, pods=(new, b.learner_pod()), baseline=None))
    assert weights(made) == ("False", reasons.SERVER_RESTARTED)
    assert "server-0" in b.message(made, reasons.WEIGHTS_IN_SYNC)
    assert "server-1" not in b.message(made, reasons.WEIGHTS_IN_SYNC)


FIGURES = ("step", "maxSteps", "progress", "loss", "tokensPerSecond", "sync", "bestStep", "bestScore")


@pytest.mark.parametrize("report", [None, LOADING], ids=["that answers nothing yet", "that loads"])
def test_learner_in_new_pod_reports_no_progress_yet(report: Any) -> None:
    raw, seen = trained(), b.started(b.job())
    pods = (servers(), another(b.learner_pod()))
    made = b.planned(raw, replace(seen, pods=pods, progress=report))
    assert [key for key in FIGURES if made.status.get(key) and key != "sync"] == []
    assert (made.status.get("sync") or {}).get("version", -1) == -1
    assert b.condition(made, reasons.READY) == ("True", reasons.NOT_SYNCED_YET)
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.NOT_SYNCED_YET)
    assert "loss" not in made.status["message"]
    JobStatus.model_validate(made.status)


def test_colocated_learner_in_new_pod_has_done_no_step() -> None:
    raw = b.job(config=b.COLOCATE, rollout={}, learner={"gpus": 4})
    seen = Observed(learner=b.learner_job(b.planned(raw)), secret=b.secret(), pods=(b.learner_pod(),))
    raw = b.with_status(raw, b.planned(raw, replace(seen, progress=b.report())))
    assert b.planned(raw, seen).status["step"] == 4
    made = b.planned(raw, replace(seen, pods=(another(b.learner_pod()),)))
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.NO_STEP_YET)


Change = Callable[[Observed], Observed]
WITHOUT_PODS: dict[str, Change] = {
    "no pods": lambda seen: replace(seen, pods=(), progress=None),
    "no children": lambda seen: Observed(secret=seen.secret),
    "servers alone": lambda seen: replace(seen, pods=(another(servers()),), progress=None),
    "a learner that waits for its servers": lambda seen: replace(
        seen, pods=(another(servers(ready=False)), another(b.waiting_learner_pod())), progress=None
    ),
}


@pytest.mark.parametrize("change", WITHOUT_PODS)
def test_status_shows_no_progress_or_weights_without_pods(change: str) -> None:
    made = b.planned(trained(), WITHOUT_PODS[change](b.started(b.job())))
    assert weights(made) == ("False", reasons.NOT_SYNCED_YET)
    assert b.condition(made, reasons.TRAINING) != ("True", reasons.TRAINS)
    assert [key for key in FIGURES if key in made.status] == []


def test_resumed_job_starts_with_no_weights_in_sync() -> None:
    """Ninety seconds after a resumption the status said that all servers held version 11, and there were none."""
    seen = b.started(b.job())
    raw = b.edited(trained(), suspend=True)
    raw = b.with_status(raw, b.planned(raw, seen))
    raw = b.with_status(raw, b.planned(raw, Observed(secret=seen.secret)))
    assert raw["status"]["phase"] == reasons.SUSPENDED
    resumed = b.edited(raw, suspend=False)
    for pods in ((), (another(servers(ready=False)), another(b.waiting_learner_pod()))):
        made = b.planned(resumed, replace(seen, pods=pods, progress=None))
        assert weights(made) == ("False", reasons.NOT_SYNCED_YET)
        resumed = b.with_status(resumed, made)


def test_renewed_secret_resets_weights_in_sync() -> None:
    raw, seen = trained(), b.started(b.job())
    for observed in (
        replace(seen, secret=None),
        replace(seen, secret=None, deployment=None, learner=None, pods=(leaving(servers()), leaving(b.learner_pod()))),
        Observed(),
        replace(seen, pods=(another(servers()), another(b.learner_pod())), progress=None),
    ):
        made = b.planned(raw, observed)
        raw = b.with_status(raw, made)
    assert weights(made) == ("False", reasons.NOT_SYNCED_YET)
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.NOT_SYNCED_YET)


def test_finished_job_keeps_progress_of_last_learner() -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.completed(b.job())))
    later = b.planned(raw, replace(b.completed(b.job()), pods=(), progress=None, deployment=None))
    assert (later.status["progress"], later.status["loss"]) == ("4/10", 0.5)


def test_status_without_pod_names_still_counts_after_upgrade() -> None:
    """It names no pod: an upgrade must not blank what a running job has done."""
    raw, seen = trained(), b.started(b.job())
    older = {key: value for key, value in raw["status"].items() if key != "learnerPod"}
    older["servers"] = [{key: value for key, value in one.items() if key != "pod"} for one in older["servers"]]
    made = b.planned({**raw, "status": older}, replace(seen, progress=None))
    assert weights(made) == ("True", reasons.SAME_VERSION)
    assert made.status["progress"] == "4/10"


def test_unreachable_condition_does_not_carry_over_to_new_learner() -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.started(b.job(), progress=None, unreachable="timed out")))
    assert b.condition(b.planned(raw, b.started(raw, progress=None)), reasons.LEARNER_REACHABLE) is not None
    pods = (servers(), another(b.learner_pod()))
    assert b.condition(b.planned(raw, b.started(raw, pods=pods, progress=None)), reasons.LEARNER_REACHABLE) is None


def test_progress_message_does_not_carry_over_to_new_learner() -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.started(b.job(), progress=b.report(message="evaluates"))))
    seen = b.started(raw, pods=(servers(), another(b.learner_pod())), progress=None)
    assert b.message(b.planned(raw, seen), reasons.LEARNER_RUNNING) == "the learner runs"


def test_terminating_learner_is_not_reported_unreachable() -> None:
    seen = b.started(b.job(), pods=(servers(), leaving(b.learner_pod())), progress=None, unreachable="refused")
    assert b.condition(b.planned(trained(), seen), reasons.LEARNER_REACHABLE) is None
