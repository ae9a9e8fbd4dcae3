"""Writes the children of a job: deletes, creates and applies them, and takes over no object of others."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from stage2_controller.children import comparison
from stage2_controller.children.manifest import Manifest
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.observe import Observer, others_in
from stage2_controller.job import kinds
from stage2_controller.job.names import Key
from stage2_controller.state import jobset
from stage2_controller.state.observed import Object, Observed

logger = logging.getLogger(__name__)


class NameTaken(Exception):
    """An object of somebody else has the name of a child that was about to be created. The next pass sees it."""


class ChildWriter:
    """Makes the children of jobs what a plan says. Its methods return what the API server refused.

    A refusal of one object does not keep others from being written. Where the API server fails, the method raises.
    """

    def __init__(self, api: Api, observer: Observer) -> None:
        self._api = api
        self._observer = observer

    async def delete(self, key: Key, unwanted: Sequence[str], observed: Observed) -> list[str]:
        """Delete the children of these kinds."""
        existing = [(kind, child) for kind in unwanted if (child := observed.child(kind))]
        return await _refusals([(kind, child, self._delete(kind, child, key)) for kind, child in existing])

    async def write(self, key: Key, job: Object, children: Sequence[Manifest], observed: Observed) -> list[str]:
        """Write what differs. Raise NameTaken.

        Nothing with pods is written once any other child was refused: servers without their NetworkPolicy would be
        open, and without Secret or Service they would load for nothing. The learner's Job comes first: its pod waits
        for its servers, whereas servers whose learner is refused would hold all their GPUs.
        """
        writes = comparison.writes(children, observed)
        of_pods = [write for write in writes if write.manifest["kind"] in kinds.ROLE_OF_PODS]
        refusals = await self._write_all([write for write in writes if write not in of_pods], key, job)
        for write in sorted(of_pods, key=lambda write: write.manifest["kind"] != kinds.LEARNER_JOB.kind):
            refusals += [] if refusals else await self._write_all([write], key, job)
        return refusals

    async def scale(self, job: Manifest) -> list[str]:
        """Give a Job of a JobSet another number of pods."""
        logger.info("%s: scale to %s pods", job["metadata"]["name"], job["spec"]["parallelism"])
        return await _refusals([(job["kind"], job, _dropped(self._api.apply(job)))])

    async def _delete(self, kind: str, child: Object, key: Key) -> None:
        metadata = child["metadata"]
        logger.info("%s: delete %s %s", key, kind, metadata["name"])
        self._observer.forget_read(kind, key)
        remaining = await self._api.delete(kind, key.namespace, metadata["name"], uid=metadata["uid"])
        self._observer.note_deleted(kind, child, remaining)

    async def _write_all(self, writes: Sequence[comparison.Write], key: Key, job: Object) -> list[str]:
        return await _refusals([(one.manifest["kind"], one.manifest, self._write(one, key, job)) for one in writes])

    async def _write(self, write: comparison.Write, key: Key, job: Object) -> None:
        kind = write.manifest["kind"]
        logger.info("%s: %s %s %s", key, write.verb, kind, write.manifest["metadata"]["name"])
        self._observer.forget_read(kind, key)
        create = write.verb == "create"
        request = self._create(write.manifest, key, job) if create else self._api.apply(write.manifest)
        self._observer.note_written(kind, key, await request)

    async def _create(self, child: Manifest, key: Key, job: Object) -> Object:
        """Create the child, by an apply: what a creation writes, no later apply would remove.

        Look at its name first, because an apply would take over what somebody else has there. If the job has the child
        already, unseen until now, apply to that.
        """
        kind = child["kind"]
        existing = await self._observer.read_now(kind, key)
        if existing is not None and others_in({kind: existing}, job):
            self._observer.suspect(key, {kind})
            raise NameTaken
        if not kinds.CHILD[kind].create_once:
            return await self._api.apply(comparison.same(child, existing) if existing else child)
        created = existing or await self._api.create(child)
        if created is None:  # somebody was quicker
            raise NameTaken
        return created


async def _dropped(request: Awaitable[Object]) -> None:
    await request


async def _refusals(requests: Sequence[tuple[str, Object, Awaitable[None]]]) -> list[str]:
    """Make requests about objects at once; return the refusals of single objects, and raise what else went wrong."""
    answers = await asyncio.gather(*(request for _, _, request in requests), return_exceptions=True)
    refusals: list[str] = []
    for (kind, body, _), answer in zip(requests, answers, strict=True):
        if isinstance(answer, ApiRefused) and answer.not_served and kind == kinds.JOBSET.kind:
            refusals.append(f"the cluster has no JobSet: {jobset.INSTALL}")
        elif isinstance(answer, ApiRefused) and answer.of_object:
            refusals.append(f"{kind} {body['metadata']['name']}: {answer.message}")
        elif answer is not None:
            raise answer
    return refusals
