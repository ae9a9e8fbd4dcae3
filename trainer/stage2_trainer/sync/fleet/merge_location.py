"""Where a run merges adapters (`vllm.sync.merge`): at the servers where they can, else at the learner.

A server can merge if its model folder has the learner's base weights. That is asked once for each connection, by
digests over HTTP; the learner's own are computed on its device, and again only for what has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import SyncMerge
from stage2_trainer.sync.fleet.report import DigestError
from stage2_trainer.sync.tensors.announcement import DIFFERS, FOLDER_ROUTE, dtype_name
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import Stamp, WeightEntry, WeightSource
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

PATH = "custom.extra.rollout_matching.vllm.sync.merge"
WAY_OUT = "set it to auto or learner, which send merged weights"
NO_ADAPTER = "no adapter trains, so there is nothing to merge"
FOLDERS_AGREE = "an adapter trains, and the model folder of every server has the learner's base weights"
LOADED_OTHERWISE = (
    "the digests of what was sent and of what was loaded differ, so something on the way changes weights: restart this"
    " server with the learner's version of stage2, and on another node if it happens again"
)
FOLDER_PHASE = "compare model folders"
NAMED_TENSORS = 3


class MergeMismatch(ServerError):
    """A server cannot merge, or has loaded other weights than the learner's.

    `MergeLocation` keeps its text as well, because errors of several servers are joined.
    """


class MergeLocation:
    """The place where a run merges. Once it has moved to the learner, it stays there.

    at_server: whether it is the servers. reason: why it is this one. mismatches: what servers objected in this push.
    """

    def __init__(self, requested: SyncMerge) -> None:
        self.requested = requested
        self.at_server = requested != "learner"
        self.reason = FOLDERS_AGREE if requested == "auto" else f"{PATH} is {requested}"
        self.mismatches: list[str] = []
        self._base: dict[str, tuple[Stamp, str]] = {}

    @property
    def effective(self) -> SyncMerge:
        """The place in use."""
        return "server" if self.at_server else "learner"

    def merge_at_learner_without_adapters(self, source: WeightSource) -> None:
        """Merge at the learner if no adapter trains. Raises ConfigError if the configuration demands the server."""
        if self.at_server and all(entry.change is None for entry in source.entries):
            self._refuse_if_demanded(NO_ADAPTER)
            self.at_server, self.reason = False, NO_ADAPTER

    def digest_base(self, source: WeightSource) -> None:
        """Digest what has changed of the learner's base weights, so that servers can be compared all at once."""
        frozen = [entry for entry in source.entries if entry.frozen]
        missing = [entry for entry in frozen if not self._is_digested(entry)]
        digests = Digests()
        if missing:  # reading nothing would still have other processes gather
            for name, tensor in source.only(frozenset(entry.name for entry in missing)).unmerged():
                digests.add(name, tensor)
        stamps = {entry.name: Stamp.from_parameter(entry.parameter) for entry in missing}
        added = {name: (stamps[name], digest) for name, digest in digests.by_tensor().items()}
        self._base = {entry.name: added.get(entry.name) or self._base[entry.name] for entry in frozen}

    def _is_digested(self, entry: WeightEntry) -> bool:
        return entry.name in self._base and self._base[entry.name][0].still_describes(entry.parameter)

    def can_merge(self, folder: Mapping[str, str], entry: WeightEntry) -> bool:
        """Whether a folder with these digests has what is below an entry's adapter, as the learner digested it last."""
        return entry.frozen and folder.get(entry.name) == self._base[entry.name][1]

    def compare_folder(self, client: ServerClient, source: WeightSource) -> Mapping[str, str]:
        """Return the digests of the learner's base weights, all of which a server's folder has.

        Raises:
            MergeMismatch: it lacks some, or the server cannot compare.
            ServerError: the server does not answer.
        """
        digests = {name: digest for name, (_, digest) in self._base.items()}
        wanted = [(e.name, dtype_name(e.parameter.dtype)) for e in source.entries if e.name in digests]
        try:
            found: Mapping[str, str] = client.post(FOLDER_ROUTE, FOLDER_PHASE, body={"tensors": wanted})["digests"]
        except ServerError as error:
            if error.status is None:
                raise
            raise self._mismatch(client, error.detail) from error
        wrong = [name for name, digest in digests.items() if found.get(name) != digest]
        if wrong:
            more = f" and {len(wrong) - NAMED_TENSORS} more" if len(wrong) > NAMED_TENSORS else ""
            named = ", ".join(wrong[:NAMED_TENSORS]) + more
            raise self._mismatch(client, f"its model folder has other base weights than the learner: {named}")
        return digests

    def settle(self) -> None:
        """Move to the learner if a server objected, and log the place. Raises ConfigError where that was ruled out."""
        if self.mismatches:
            self._refuse_if_demanded("; ".join(self.mismatches))
            self._move_to_learner()
        logger.info("%s: adapters are merged at the %s: %s", PATH, self.effective, self.reason)

    @contextmanager
    def noting_mismatches(self) -> Iterator[None]:
        """Note if a server reports in the block that it has loaded other weights. Raises MergeMismatch then."""
        try:
            yield
        except ServerError as error:
            if DIFFERS not in error.detail:  # it was restarted, or lost its group: a retry may succeed
                raise
            mismatch = MergeMismatch(error.server, error.phase, error.detail, status=error.status)
            self.mismatches.append(str(mismatch))
            raise mismatch from error

    def moved_to_learner(self) -> bool:
        """Move to the learner after a failed push in which a server objected; returns whether it did: try again then.

        Raises:
            DigestError: a server cannot merge, or did it wrongly, and the learner was ruled out; or it has loaded other
                weights than the learner had merged.
        """
        if not self.mismatches:
            return False
        found = "; ".join(self.mismatches)
        if self.requested == "server":
            raise DigestError(f"{PATH} is server, and {found}; {WAY_OUT}")
        if not self.at_server:
            raise DigestError(f"{found}: {LOADED_OTHERWISE}")
        self._move_to_learner()
        return True

    def _mismatch(self, client: ServerClient, detail: str) -> MergeMismatch:
        mismatch = MergeMismatch(client.base_url, FOLDER_PHASE, detail)
        self.mismatches.append(str(mismatch))
        return mismatch

    def _refuse_if_demanded(self, reason: str) -> None:
        if self.requested == "server":
            raise ConfigError((Problem(PATH, "server", f"the servers cannot merge: {reason}", WAY_OUT),))

    def _move_to_learner(self) -> None:
        self.at_server, self.reason = False, "; ".join(self.mismatches)
        logger.warning("the learner merges for the rest of the run: %s", self.reason)
        self.mismatches = []
