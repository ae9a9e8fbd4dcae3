"""One pass over one job: observe, plan, write what differs, tell the status once, then its events."""

import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp

from stage2_controller import conditions, drift, names, outcome
from stage2_controller import status as statuses
from stage2_controller.apply import Api, ApiRefused
from stage2_controller.events import events
from stage2_controller.observe import Key, Store
from stage2_controller.observed import Object, Observed, terminating
from stage2_controller.plan import Plan, Settings, plan
from stage2_controller.progress import ProgressReader
from stage2_controller.queue import RetryLater

logger = logging.getLogger(__name__)

_ROLE_OF_KIND = {"Deployment": names.ROLE_ROLLOUT, "Service": names.ROLE_ROLLOUT, "Job": names.ROLE_LEARNER}


def utc_now() -> datetime:
    """The time of a pass."""
    return datetime.now(UTC)


class Reconciler:
    """Brings jobs to what their plan says. Called by the queue, one pass at a time for each job."""

    def __init__(
        self,
        api: Api,
        store: Store,
        progress: ProgressReader,
        settings: Settings,
        *,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._api = api
        self._store = store
        self._progress = progress
        self._settings = settings
        self._clock = clock

    async def __call__(self, key: Key) -> float | None:
        """One pass; the seconds until the next one is wanted. Raises RetryLater if the API server fails."""
        try:
            return await self._pass(key)
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            raise RetryLater(str(error) or type(error).__name__) from error

    async def _pass(self, key: Key) -> float | None:
        raw = self._store.one(names.KIND, key, key.name)
        if raw is None or terminating(raw):
            return None
        observed = await self._observe(key, raw)
        now = self._clock()
        intended = plan(raw, observed, settings=self._settings, now=now, new_token=lambda: secrets.token_urlsafe(32))
        refusals = await self._carry_out(key, intended, observed)
        await self._tell(raw, intended, refusals, now)
        if intended.delete_job:
            await self._api.delete(names.KIND, key.namespace, key.name)
        if refusals:
            raise RetryLater("; ".join(refusals))
        return intended.again_after_s

    async def _observe(self, key: Key, raw: Object) -> Observed:
        def watched(kind: str) -> Object | None:
            return self._store.one(kind, key, names.child_name(key.name, _ROLE_OF_KIND[kind]))

        seen = Observed(
            deployment=watched("Deployment"),
            service=watched("Service"),
            learner=watched("Job"),
            pods=self._store.all("Pod", key),
        )
        if outcome.final(raw.get("status") or {}):
            return seen  # nothing is created for a job that has ended, so nothing more has to be read
        secret = await self._api.get("Secret", key.namespace, names.child_name(key.name, names.ROLE_TOKEN))
        configmap = await self._api.get("ConfigMap", key.namespace, names.child_name(key.name, names.ROLE_CONFIG))
        progress = await self._progress.read(seen.pod(names.ROLE_LEARNER), secret)
        return Observed(**{**vars(seen), "secret": secret, "configmap": configmap, "progress": progress})

    async def _carry_out(self, key: Key, intended: Plan, observed: Observed) -> list[str]:
        """Writes what differs; what the API server refused."""
        refusals: list[str] = []
        for kind in intended.deletions:
            await self._api.delete(kind, key.namespace, names.child_name(key.name, _ROLE_OF_KIND[kind]))
        for write in drift.writes(intended.children, observed):
            logger.info("%s: %s %s %s", key, write.verb, write.manifest["kind"], write.manifest["metadata"]["name"])
            try:
                await self._write(write)
            except ApiRefused as error:
                refusals.append(f"{write.manifest['kind']} {write.manifest['metadata']['name']}: {error.message}")
                if error.status >= 500:
                    raise
        return refusals

    async def _write(self, write: drift.Write) -> None:
        kind = write.manifest["kind"]
        written = await (self._api.create if write.verb == "create" else self._api.apply)(write.manifest)
        if written is not None and kind in _ROLE_OF_KIND:
            self._store.put(kind, written)

    async def _tell(self, raw: Object, intended: Plan, refusals: list[str], now: datetime) -> None:
        previous: Mapping[str, Any] = raw.get("status") or {}
        status = intended.status
        if intended.children:
            status = statuses.with_refusals(status, previous, refusals, now=now)
        if status == previous:
            return
        written = await self._api.apply_status(raw, status)
        if written is None:
            return
        self._store.put(names.KIND, written)
        for event in events(previous, status):
            try:
                await self._api.emit(raw, event, at=conditions.timestamp(now))
            except ApiRefused as error:  # an event is a courtesy; the status has already told
                logger.warning("no event: %s", error)
