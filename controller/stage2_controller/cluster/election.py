"""Leader election by a Lease: one of several controllers works, the others wait until they take over.

The rules are those of Kubernetes' own components: the holder renews the Lease, and another candidate takes it after it
was unchanged for its duration. Only our own clock counts, never the times that other machines wrote.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.state.observed import Object

logger = logging.getLogger(__name__)

DURATION_S = 15.0  # a follower takes a Lease that has not changed for this long
RENEW_S = 10.0  # a leader whose last renewal was sent this long ago stops, well before another starts
RETRY_S = 2.0
ATTEMPT_S = RENEW_S / 2  # for one answer, so that there is time to repeat a lost request
_REFUSED = (ApiRefused, aiohttp.ClientError, TimeoutError, ValueError, KeyError)  # the last two: the object is no Lease


class Election:
    """One candidate. `acquire` returns when it leads, and `hold` when it no longer does."""

    def __init__(
        self, api: Api, namespace: str, name: str, *, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._seen: Object | None = None
        self._seen_at = clock()
        self._heard_at = clock()
        self.heard = False  # whether the API server has answered at least once
        self.led_by_another = False  # whether another one was seen to renew the Lease
        self._asked_at = clock()  # when the last successful request for the Lease was sent

    async def acquire(self) -> None:
        """Try until the Lease is ours."""
        logger.info("standing by for the Lease %s/%s", self._namespace, self._name)
        while not await self._attempt(ATTEMPT_S):
            await asyncio.sleep(RETRY_S)
        logger.info("leading: %s holds the Lease %s/%s", self._identity, self._namespace, self._name)

    async def hold(self) -> None:
        """Renew until that fails for too long, or somebody else holds the Lease.

        Returns RENEW_S after the last good renewal was sent, whatever the API server does in between: others count from
        a later moment, at which they see it.
        """
        while (left_s := self._left_s()) > 0:
            await asyncio.sleep(min(RETRY_S, left_s))
            renewed = await self._attempt(min(ATTEMPT_S, self._left_s()))
            if not renewed and self._seen is not None and _holder(self._seen) != self._identity:
                break
        logger.error("no longer leading: the Lease %s/%s could not be renewed", self._namespace, self._name)

    async def release(self) -> None:
        """Give the Lease up, so that the next one need not wait for its end."""
        if self._seen is None or _holder(self._seen) != self._identity:
            return
        try:
            async with asyncio.timeout(RETRY_S):
                await self._api.replace(self._written("", self._seen))
        except _REFUSED as error:
            logger.warning("could not release the Lease, which will expire: %s", error)

    def not_ready(self) -> str | None:
        """Return why a candidate that stands by is no replacement yet; None once it is.

        Where the one that held the Lease is gone, nobody leads, and whoever waits for ready replicas has to wait.
        """
        if not self.heard:
            return "has had no answer about the Lease yet"
        return self.problem(DURATION_S) if self.led_by_another else "waits for the Lease: nobody has renewed it yet"

    def problem(self, limit_s: float) -> str | None:
        """Return that the API server has not answered about the Lease for longer than this, if so."""
        silent_s = self._clock() - self._heard_at
        return f"no answer about the Lease for {silent_s:.0f} s" if silent_s > limit_s else None

    def _left_s(self) -> float:
        """Seconds for which the Lease is surely ours."""
        return self._asked_at + RENEW_S - self._clock()

    async def _attempt(self, limit_s: float) -> bool:
        """Try once to get or keep the Lease; return whether it is ours now."""
        asked_at = self._clock()
        try:
            async with asyncio.timeout(limit_s):  # wait_for would swallow a cancellation that comes with the answer
                ours = await self._take()
        except _REFUSED as error:
            logger.warning("the Lease cannot be reached: %s", str(error) or type(error).__name__)
            return False
        self.heard, self._heard_at = True, self._clock()
        if ours:
            self._asked_at = asked_at
        return ours

    async def _take(self) -> bool:
        lease = await self._api.get("Lease", self._namespace, self._name)
        if lease is None:
            return self._keep(await self._api.create(self._written(self._identity, None)))
        if self._seen is None or lease["metadata"]["resourceVersion"] != self._seen["metadata"]["resourceVersion"]:
            self.led_by_another |= self._seen is not None and _holder(lease) not in ("", self._identity)
            self._seen, self._seen_at = lease, self._clock()
        free = not _holder(lease) or self._clock() - self._seen_at >= DURATION_S
        if _holder(lease) != self._identity and not free:
            return False
        return self._keep(await self._api.replace(self._written(self._identity, lease)))

    def _keep(self, lease: Object | None) -> bool:
        if lease is None:  # another one was quicker
            return False
        self._seen, self._seen_at = lease, self._clock()
        return True

    def _written(self, holder: str, before: Object | None) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: dict[str, Any] = dict(before["spec"]) if before else {}
        changed = old.get("holderIdentity") != holder
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if before:
            metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(DURATION_S),
            "acquireTime": now if changed else old.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": old.get("leaseTransitions", 0) + (1 if changed and before else 0),
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _holder(lease: Object) -> str:
    return lease.get("spec", {}).get("holderIdentity") or ""
