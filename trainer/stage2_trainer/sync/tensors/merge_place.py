"""The place where adapters are merged: at the servers where they can, else at the learner (`vllm.sync.merge`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import SyncMerge
from stage2_trainer.sync.fleet.errors import DigestError
from stage2_trainer.sync.fleet.server_recipe import DIFFERS, expectation
from stage2_trainer.sync.fleet.sync_session import SyncSession
from stage2_trainer.sync.tensors.folder_proof import BaseDigests, prove_folder
from stage2_trainer.sync.tensors.merge import WeightSource
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

PATH = "custom.extra.rollout_matching.vllm.sync.merge"
WAY_OUT = "set it to auto or learner, which send merged weights"
NO_ADAPTER = "no adapter trains, so there is nothing to merge"
FOLDERS_AGREE = "an adapter trains, and the model folder of every server has the learner's base weights"
LOADED_OTHERWISE = (
    "the digests of what was sent and of what was loaded differ, so something on the way changes weights: start this"
    " server anew, with the learner's version of stage2 and on another node if it comes again"
)
FOLDER_PHASE = "compare model folders"
NOTHING_SENT: dict[str, list[object]] = {"names": [], "dtype_names": [], "shapes": []}


def question(layers: Mapping[str, str]) -> str:
    """Return the announcement, as JSON text, that asks a server whether it has loaded layers of these digests."""
    return json.dumps({**NOTHING_SENT, **expectation(layers)})


class Objection(ServerError):
    """A server cannot merge, or has loaded other weights than the learner's.

    It is told to `MergePlace` as well: errors of servers are joined.
    """


class MergePlace:
    """The place where a run merges. Once it has moved to the learner, it stays there. reason: why it is this one."""

    def __init__(self, requested: SyncMerge) -> None:
        self.requested = requested
        self.at_server = requested != "learner"
        self.reason = FOLDERS_AGREE if requested == "auto" else f"{PATH} is {requested}"
        self.objections: list[str] = []
        self._own = BaseDigests()

    @property
    def effective(self) -> SyncMerge:
        """The place in use."""
        return "server" if self.at_server else "learner"

    def require_adapters(self, source: WeightSource) -> None:
        """Move to the learner where no adapter trains. Raises ConfigError where that was ruled out."""
        if self.at_server and all(entry.change is None for entry in source.entries):
            self._refuse_if_demanded(NO_ADAPTER)
            self.at_server, self.reason = False, NO_ADAPTER

    def settle(self) -> None:
        """Move to the learner if a server has objected. Raises ConfigError where that was ruled out."""
        if self.objections:
            self._refuse_if_demanded("; ".join(self.objections))
            self._move()
        self.tell()

    def tell(self) -> None:
        """Say where adapters are merged, and why."""
        logger.info("%s: adapters are merged at the %s: %s", PATH, self.effective, self.reason)

    def recover(self) -> bool:
        """Whether a failed sync is worth another with merges at the learner, to which this moves.

        Raises:
            DigestError: a server cannot merge, or did it wrongly, and the learner was ruled out; or it has loaded other
                weights than the learner had merged.
        """
        if not self.objections:
            return False
        objections = "; ".join(self.objections)
        if self.requested == "server":
            raise DigestError(f"{PATH} is server, and {objections}; {WAY_OUT}")
        if not self.at_server:
            raise DigestError(f"{objections}: {LOADED_OTHERWISE}")
        self._move()
        return True

    def compare_folders(self, source: WeightSource) -> None:
        """Compute the learner's digests, so that servers can be compared all at once."""
        self._own.of(source)

    def compare_folder(self, session: SyncSession, source: WeightSource) -> None:
        """See that a server's folder has the learner's base weights. Raises ServerError; Objection if it has not."""
        if session.folder is not None:
            return
        found = prove_folder(session.client, source, self._own)
        if isinstance(found, str):
            raise self._objection(Objection(session.client.base_url, FOLDER_PHASE, found))
        session.folder = found

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Take note where a server says in the block that it has loaded other weights than the learner's.

        Raises:
            Objection: one has.
        """
        try:
            yield
        except ServerError as error:
            if DIFFERS not in error.detail:  # it was restarted, or lost its group: another try may go well
                raise
            raise self._objection(Objection(error.server, error.phase, error.detail, status=error.status)) from error

    def _objection(self, objection: Objection) -> Objection:
        self.objections.append(str(objection))
        return objection

    def _refuse_if_demanded(self, reason: str) -> None:
        if self.requested == "server":
            raise ConfigError((Problem(PATH, "server", f"the servers cannot merge: {reason}", WAY_OUT),))

    def _move(self) -> None:
        self.at_server, self.reason = False, "; ".join(self.objections)
        logger.warning("the learner merges for the rest of the run: %s", self.reason)
        self.objections = []
