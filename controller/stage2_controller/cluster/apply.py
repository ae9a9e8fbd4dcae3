"""Writing of the children of a job: what has to go is deleted, what differs applied or created, nothing taken over."""

import asyncio
import logging
from collections.abc import Sequence

from stage2_controller.children import comparison
from stage2_controller.children.manifest import Manifest
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.observe import Observer, others_in
from stage2_controller.observed import Object, Observed
from stage2_controller.spec import kinds
from stage2_controller.spec.names import Key

logger = logging.getLogger(__name__)


class NameTaken(Exception):
    """The name of what was about to be created is that of something that is not the job's: the next pass sees it."""


class ChildWriter:
    """A writer that makes the children of jobs what a plan says."""

    def __init__(self, api: Api, observer: Observer) -> None:
        self._api = api
        self._observer = observer

    async def delete(self, key: Key, unwanted: Sequence[str], observed: Observed) -> list[str]:
        """Delete the children of these kinds, and return what the API server refused."""
        refusals: list[str] = []
        for kind in unwanted:
            if there := observed.child(kind):
                metadata = there["metadata"]
                logger.info("%s: delete %s %s", key, kind, metadata["name"])
                self._observer.forget_read(kind, key)
                try:
                    left = await self._api.delete(kind, key.namespace, metadata["name"], uid=metadata["uid"])
                except ApiRefused as error:
                    refusals.append(f"{kind} {metadata['name']}: {error.message}")
                    if not error.of_object:
                        raise
                else:
                    self._observer.note_deleted(kind, there, left)
        return refusals

    async def write(self, key: Key, job: Object, children: Sequence[Manifest], observed: Observed) -> list[str]:
        """Write what differs, and return what the API server refused. Raise NameTaken.

        Nothing with pods is written once anything was refused: servers without their NetworkPolicy would stand open,
        and without Secret or Service load for nothing. The learner's Job is first: its pod waits for its servers, and
        servers whose learner is refused would hold all their GPUs.
        """
        writes = comparison.writes(children, observed)
        of_pods = [write for write in writes if write.manifest["kind"] in kinds.ROLE_OF_PODS]
        refusals = await self._write_all([write for write in writes if write not in of_pods], key, job)
        for write in sorted(of_pods, key=lambda write: write.manifest["kind"] != kinds.LEARNER_JOB.kind):
            refusals += [] if refusals else await self._write_all([write], key, job)
        return refusals

    async def _write_all(self, writes: Sequence[comparison.Write], key: Key, job: Object) -> list[str]:
        """Write these children at once, and return what the API server refused; raise what ends the pass at the end."""
        answers = await asyncio.gather(*(self._write(write, key, job) for write in writes), return_exceptions=True)
        refusals: list[str] = []
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(answer, ApiRefused) and answer.of_object:
                metadata = write.manifest["metadata"]
                refusals.append(f"{write.manifest['kind']} {metadata['name']}: {answer.message}")
            elif answer is not None:
                raise answer
        return refusals

    async def publish(self, key: Key, slices: Sequence[Manifest]) -> list[str]:
        """Write EndpointSlices, and return what the API server refused.

        An apply takes over an object of that name: a pod's own, made up for it by its ReplicaSet.
        """
        refusals: list[str] = []
        for one in slices:
            logger.info("%s: apply %s %s", key, one["kind"], one["metadata"]["name"])
            try:
                self._observer.note_written(one["kind"], key, await self._api.apply(one))
            except ApiRefused as error:
                refusals.append(f"{one['kind']} {one['metadata']['name']}: {error.message}")
                if not error.of_object:
                    raise
        return refusals

    async def _write(self, write: comparison.Write, key: Key, job: Object) -> None:
        kind = write.manifest["kind"]
        logger.info("%s: %s %s %s", key, write.verb, kind, write.manifest["metadata"]["name"])
        self._observer.forget_read(kind, key)
        made = self._create(write.manifest, key, job) if write.verb == "create" else self._apply(write.manifest)
        self._observer.note_written(kind, key, await made)

    async def _create(self, child: Manifest, key: Key, job: Object) -> Object:
        """Create the child; make one that the job has already, unseen until now, what it should be."""
        kind = child["kind"]
        created = await self._api.create(child)
        if created is not None:
            return created
        there = await self._observer.read_now(kind, key)
        if there is None:  # it went in between
            raise NameTaken
        if others_in({kind: there}, job):
            self._observer.suspect(key, {kind})
            raise NameTaken
        return there if kinds.CHILD[kind].create_once else await self._apply(comparison.same(child, there))

    async def _apply(self, child: Manifest) -> Object:
        metadata = child["metadata"]
        await self._api.hold_by_apply(child["kind"], metadata["namespace"], metadata["name"])
        return await self._api.apply(child)
