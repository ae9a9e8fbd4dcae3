"""Signs of what makes nodes in this cluster, read once in a while: the cluster autoscaler's status, Karpenter's API."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Protocol, TypeVar

from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.named_objects import Getter
from stage2_controller.observed import Object
from stage2_controller.place.node_fit import Autoscaling
from stage2_controller.spec.settings import NodesMayCome

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
STATUS_NAME = "cluster-autoscaler-status"
"""The ConfigMap that the cluster autoscaler writes (--status-config-map-name)."""
STATUS_NAMESPACES = ("kube-system", "openshift-machine-api")
_UPDATED = "cluster-autoscaler.kubernetes.io/last-updated"
STALE_AFTER = timedelta(hours=1)
"""Age at which that status is what an autoscaler left behind that is gone. One that is there writes every round, some
10 s; its own probe ends it after 15 minutes that failed (--max-failing-time), or 20 of a start (--max-startup-time).
An hour leaves room for both, and for clocks that differ."""
KARPENTER_GROUP = "karpenter.sh"
_READ_AGAIN = timedelta(minutes=2)


class Discovery(Getter, Protocol):
    """An API that also tells its groups; `stage2_controller.cluster.api_server.Api` is one."""

    async def serves(self, group: str) -> bool:
        """Return whether a group of definitions is served."""
        ...


class Autoscalers:
    """What makes nodes, as it was at most two minutes ago; nothing is asked where nothing would follow.

    A sign that the controller may not read counts as none.
    """

    def __init__(self, api: Discovery, nodes_may_come: NodesMayCome, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._nodes_may_come = nodes_may_come
        self._clock = clock
        self._read: tuple[datetime, Autoscaling] | None = None  # with the end of its use
        self._refused: set[str] = set()
        self._stale: set[str] = set()  # namespaces of a status that nobody writes any more, which was said
        self._reading = asyncio.Lock()  # passes at one time ask once

    async def seen(self) -> Autoscaling:
        """Return what there is, or was when it could be asked last.

        Raises ApiRefused where it never could, for another reason than a missing right.
        """
        if self._nodes_may_come == "never":
            return Autoscaling("never")
        async with self._reading:
            now = self._clock()
            if self._read is None or self._read[0] <= now:
                self._read = now + _READ_AGAIN, await self._found()
            return self._read[1]

    async def _found(self) -> Autoscaling:
        try:
            return Autoscaling(
                self._nodes_may_come,
                cluster_autoscaler=self._nodes_may_come == "auto" and await self._has_status(),
                karpenter=bool(await self._allowed(self._api.serves(KARPENTER_GROUP))),
            )
        except ApiRefused as error:
            if self._read is None:
                raise
            logger.warning("%s: what makes nodes is taken to be as it was", error)
            return self._read[1]

    async def _has_status(self) -> bool:
        for namespace in STATUS_NAMESPACES:
            status = await self._allowed(self._api.get("ConfigMap", namespace, STATUS_NAME))
            if status and self._is_written(namespace, status):
                return True
        return False

    def _is_written(self, namespace: str, status: Object) -> bool:
        """Return whether somebody still writes it; one whose time is missing or no time is taken as written."""
        text = (status["metadata"].get("annotations") or {}).get(_UPDATED, "")
        age = self._clock() - (_instant(text) or self._clock())
        if age <= STALE_AFTER:
            self._stale.discard(namespace)
            return True
        if namespace not in self._stale:
            self._stale.add(namespace)
            logger.warning(
                "ConfigMap %s/%s: %s is %s: counts as no sign of an autoscaler, which writes it all the time; delete"
                " it, or set controller.nodesMayCome of the chart",
                *(namespace, STATUS_NAME, _UPDATED, text),
            )
        return False

    async def _allowed(self, asked: Awaitable[_Answer]) -> _Answer | None:
        try:
            return await asked
        except ApiRefused as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            if str(error) not in self._refused:
                self._refused.add(str(error))
                logger.warning("%s: counts as no sign of an autoscaler (controller.nodesMayCome)", error)
            return None


def _instant(text: str) -> datetime | None:
    """Return the time of `2026-09-15 04:05:52.354884346 +0000 UTC`, as the cluster autoscaler writes it."""
    try:
        day, clock, offset, _ = text.split(" ")
        told = datetime.fromisoformat(f"{day}T{clock}{offset}")
    except ValueError:
        return None
    return told if told.tzinfo else None
