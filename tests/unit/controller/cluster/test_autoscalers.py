"""Signs of an autoscaler: read once in two minutes, and not at all where the admin's word decides."""

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.autoscalers import STALE_AFTER, STATUS_NAME, Autoscalers
from stage2_controller.place.node_fit import Autoscaling
from tests.unit.controller.cluster.test_named_objects import Clock


def written(at: datetime | str) -> dict[str, str]:
    """The annotation as the cluster autoscaler writes it: Go's time with nanoseconds, and the zone's name."""
    text = at if isinstance(at, str) else at.strftime("%Y-%m-%d %H:%M:%S.%f346 +0000 UTC")
    return {"cluster-autoscaler.kubernetes.io/last-updated": text}


class Cluster:
    """An API server with ConfigMaps by namespace and name, and groups; it may refuse all that."""

    def __init__(self, *maps: tuple[str, str], groups: tuple[str, ...] = (), refusal: int = 0) -> None:
        self.maps, self.groups, self.refusal = maps, groups, refusal
        self.annotations: dict[str, str] = {}
        self.asked: list[str] = []

    async def get(self, kind: str, namespace: str | None, name: str) -> Any:
        self._ask(f"{kind} {namespace}/{name}")
        body = {"metadata": {"name": STATUS_NAME, "annotations": self.annotations}}
        return body if (namespace, name) in self.maps else None

    async def serves(self, group: str) -> bool:
        self._ask(group)
        return group in self.groups

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.refusal:
            answer: Any = SimpleNamespace(status=self.refusal, reason="No", body="{}")
            raise ApiRefused(what, answer)


@pytest.mark.parametrize("namespace", ["kube-system", "openshift-machine-api"])
async def test_the_status_of_the_cluster_autoscaler_is_a_sign(namespace: str) -> None:
    there = Cluster((namespace, STATUS_NAME))
    assert await Autoscalers(there, "auto", Clock()).seen() == Autoscaling(cluster_autoscaler=True)
    assert await Autoscalers(Cluster(("elsewhere", STATUS_NAME)), "auto", Clock()).seen() == Autoscaling()


async def test_a_status_that_nobody_writes_any_more_is_no_sign_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there, clock = Cluster(("kube-system", STATUS_NAME)), Clock()
    there.annotations = written(clock.now)
    seen = Autoscalers(there, "auto", clock)
    assert await seen.seen() == Autoscaling(cluster_autoscaler=True)
    clock.now += STALE_AFTER
    assert await seen.seen() == Autoscaling(cluster_autoscaler=True), "as long as one that works may be silent"
    for _ in range(3):
        clock.now += timedelta(minutes=2)
        assert await seen.seen() == Autoscaling()
    (told,) = caplog.messages
    assert told.startswith(f"ConfigMap kube-system/{STATUS_NAME}: cluster-autoscaler.kubernetes.io/last-updated is ")
    assert "controller.nodesMayCome" in told
    there.annotations = written(clock.now)
    clock.now += timedelta(minutes=2)
    assert await seen.seen() == Autoscaling(cluster_autoscaler=True), "it came back"
    clock.now += 2 * STALE_AFTER
    assert await seen.seen() == Autoscaling()
    assert len(caplog.messages) == 2, "and went again"


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("2026-09-15 04:05:52.354884346 +0000 UTC", False),
        ("2026-09-15 04:05:52 +0000 UTC", False),
        ("2018-07-25 22:59:22.6 +0200 CEST", False),
        ("2018-07-25 22:59:22  CEST", True),
        ("yesterday", True),
        ("", True),
    ],
)
async def test_a_status_without_a_time_that_can_be_read_is_a_sign(text: str, sign: bool) -> None:
    there, clock = Cluster(("kube-system", STATUS_NAME)), Clock()
    clock.now = datetime.fromisoformat("2026-09-16T00:00:00+00:00")
    there.annotations = written(text)
    assert await Autoscalers(there, "auto", clock).seen() == Autoscaling(cluster_autoscaler=sign)


async def test_karpenters_api_is_a_sign_whatever_nodes_there_are() -> None:
    there = Cluster(groups=("karpenter.sh",))
    assert await Autoscalers(there, "auto", Clock()).seen() == Autoscaling(karpenter=True)
    assert await Autoscalers(there, "always", Clock()).seen() == Autoscaling("always", karpenter=True)


async def test_signs_are_read_again_after_two_minutes_only() -> None:
    there, clock = Cluster(), Clock()
    seen = Autoscalers(there, "auto", clock)
    for _ in range(3):
        assert await seen.seen() == Autoscaling()
    assert len(there.asked) == 3, "two ConfigMaps, one group"
    there.groups = ("karpenter.sh",)
    clock.now += timedelta(minutes=2)
    assert await seen.seen() == Autoscaling(karpenter=True)


async def test_where_no_node_may_come_nothing_is_asked() -> None:
    there = Cluster()
    assert await Autoscalers(there, "never", Clock()).seen() == Autoscaling("never")
    assert there.asked == []


async def test_what_may_not_be_read_is_no_sign_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    there, clock = Cluster((("kube-system", STATUS_NAME)), refusal=403), Clock()
    seen = Autoscalers(there, "auto", clock)
    for _ in range(2):
        assert await seen.seen() == Autoscaling()
        clock.now += timedelta(minutes=2)
    assert len(caplog.messages) == 3
    there.refusal = 500
    assert await seen.seen() == Autoscaling()
    assert "is taken to be as it was" in caplog.messages[-1]
    with pytest.raises(ApiRefused):
        await Autoscalers(there, "auto", clock).seen()


async def test_passes_at_one_time_ask_once() -> None:
    class Slow(Cluster):
        async def serves(self, group: str) -> bool:
            await asyncio.sleep(0)
            return await super().serves(group)

    there = Slow(groups=("karpenter.sh",))
    seen = Autoscalers(there, "auto", Clock())
    assert await asyncio.gather(*(seen.seen() for _ in range(8))) == [Autoscaling(karpenter=True)] * 8
    assert len(there.asked) == 3
