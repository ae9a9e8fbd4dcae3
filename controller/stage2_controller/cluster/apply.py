"""Writing of the children of a job: what has to go is deleted, what differs applied or created, nothing taken over."""

import logging
from collections.abc import Sequence

from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.observe import Observer, others_in
from stage2_controller.job import diff, kinds
from stage2_controller.job.children.meta import Manifest
from stage2_controller.job.key import Key
from stage2_controller.job.observed import Object, Observed

logger = logging.getLogger(__name__)


class NameTaken(Exception):
    """The name of what is about to be created is that of something that is not the job's: the next pass sees it."""


class ChildWriter:
    """A writer that makes the children of jobs what a plan says."""

    def __init__(self, api: Api, observer: Observer) -> None:
        self._api = api
        self._observer = observer

    async def check_names(self, key: Key, job: Object, children: Sequence[Manifest], observed: Observed) -> None:
        """Raise NameTaken if a child that is to be applied has the name of another object: an apply takes it over."""
        others = await self._observer.others_under(diff.names_to_check(children, observed), key, job)
        if others:
            raise NameTaken

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
                    if error.status >= 500:
                        raise
                else:
                    self._observer.deleted(kind, there, left)
        return refusals

    async def write(self, key: Key, job: Object, children: Sequence[Manifest], observed: Observed) -> list[str]:
        """Write what differs, and return what the API server refused. Raise NameTaken.

        Nothing with pods is written once anything was refused: servers without their NetworkPolicy would stand open,
        and without Secret or Service load for nothing.
        """
        refusals: list[str] = []
        for write in diff.writes(children, observed):
            kind, name = write.manifest["kind"], write.manifest["metadata"]["name"]
            if refusals and kind in kinds.ROLE_OF_PODS:
                continue
            logger.info("%s: %s %s %s", key, write.verb, kind, name)
            try:
                await self._write(write, key, job)
            except ApiRefused as error:
                refusals.append(f"{kind} {name}: {error.message}")
                if error.status >= 500:
                    raise
        return refusals

    async def _write(self, write: diff.Write, key: Key, job: Object) -> None:
        kind = write.manifest["kind"]
        self._observer.forget_read(kind, key)
        written = await (self._api.create if write.verb == "create" else self._api.apply)(write.manifest)
        if written is None:  # it exists
            written = await self._observer.read_now(kind, key)
            if others_in({kind: written}, job):
                self._observer.suspect(key, {kind})
                raise NameTaken
        if written is not None:
            self._observer.written(kind, key, written)
