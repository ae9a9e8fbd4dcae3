"""A pass over a job whose learner has had no pod for long: an event of its Job says why, and the job says it too."""

from datetime import timedelta
from typing import Any, cast

from stage2_controller import conditions, reasons
from stage2_controller.cluster.progress import ProgressPolls, ProgressReader
from stage2_controller.conditions import timestamp
from stage2_controller.metrics import Metrics
from stage2_controller.place.binding import UNMADE_S
from stage2_controller.reconcile import Reconciler
from stage2_controller.spec import names
from stage2_controller.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller.loop.test_reconcile import KEY, Object, Server


class Eventful(Server):
    """The same server, which has an event of every object."""

    async def events_of(self, namespace: str, uid: str, reason: str) -> list[Object]:
        told = timestamp(b.NOW + timedelta(seconds=30))
        return [{"metadata": {"creationTimestamp": told}, "message": f"{namespace} {uid} {reason}"}]


async def test_the_job_says_what_the_event_says() -> None:
    server, store, after_s = Eventful(), Store(), [0.0]
    store.put(names.KIND, server.put(b.job()))
    progress = ProgressPolls(ProgressReader(), lambda key: None, interval_s=b.SETTINGS.progress_s)
    leader = Reconciler(
        cast("Any", server),
        store,
        progress,
        b.SETTINGS,
        metrics=Metrics(lambda: store.known(names.KIND)),
        clock=lambda: b.NOW + timedelta(seconds=after_s[0]),
    )
    await leader(KEY)
    after_s[0] = UNMADE_S
    await leader(KEY)
    await progress.close()
    uid = server.objects["Job", "job-3v1-learner"]["metadata"]["uid"]
    told = conditions.find(server.objects[names.KIND, KEY.name]["status"], reasons.LEARNER_RUNNING) or {}
    assert told["reason"] == reasons.POD_REFUSED
    assert told["message"].endswith(f"team-a {uid} FailedCreate")
