"""Signs of what makes nodes in this cluster, read once in a while: the cluster autoscaler's status, Karpenter's API."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Protocol

from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.named_objects import Getter
from stage2_controller.job.node_fit import Autoscaling
from stage2_controller.job.settings import NodesMayCome

logger = logging.getLogger(__name__)

STATUS_NAME = "cluster-autoscaler-status"
"""The ConfigMap that the cluster autoscaler writes (--status-config-map-name)."""
STATUS_NAMESPACES = ("kube-system", "openshift-machine-api")
KARPENTER_GROUP = "karpenter.sh"
_READ_AGAIN = timedelta(minutes=2)


class Discovery(Getter, Protocol):
    """An API that also tells its groups; `stage2_controller.cluster.api_server.Api` is one."""

    async def serves(self, group: str) -> bool:
        """Return whether a group of definitions is served."""
        ...


class Autoscalers:
    """What makes nodes, as it was at most two minutes ago; nothing is asked where the admin's word decides.

    A sign that the controller may not read counts as none.
    """

    def __init__(self, api: Discovery, nodes_may_come: NodesMayCome, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._nodes_may_come = nodes_may_come
        self._clock = clock
        self._read: tuple[datetime, Autoscaling] | None = None  # with the end of its use
        self._refused: set[str] = set()
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
                karpenter=await self._allowed(self._api.serves(KARPENTER_GROUP)),
            )
        except ApiRefused as error:
            if self._read is None:
                raise
            logger.warning("%s: what makes nodes is taken to be as it was", error)
            return self._read[1]

    async def _has_status(self) -> bool:
        for namespace in STATUS_NAMESPACES:
            if await self._allowed(self._api.get("ConfigMap", namespace, STATUS_NAME)):
                return True
        return False

    async def _allowed(self, asked: Awaitable[object]) -> bool:
        try:
            return bool(await asked)
        except ApiRefused as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            if str(error) not in self._refused:
                self._refused.add(str(error))
                logger.warning("%s: counts as no sign of an autoscaler (controller.nodesMayCome)", error)
            return False
