"""The proof that a server's model folder has the tensors that the learner trains on top of.

Digests are asked for once for each connection, over HTTP; the learner's own are computed on its device, and computed
again only for what has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stage2_trainer.sync.fleet.held_versions import Stamp
from stage2_trainer.sync.fleet.server_recipe import dtype_name
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource
from stage2_trainer.sync.tensors.model_folder import FOLDER_ROUTE
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError

PHASE = "compare model folders"
NAMED_TENSORS = 3


class FolderProof:
    """The tensors of the learner that a server's folder was found to have, as they were then."""

    def __init__(self, stamps: Mapping[str, Stamp]) -> None:
        self._stamps = stamps

    def covers(self, entry: WeightEntry) -> bool:
        """Whether the server can read this entry's parameter from its folder."""
        stamp = self._stamps.get(entry.name)
        return stamp is not None and stamp.still_describes(entry.parameter)

    def is_of(self, stamps: Mapping[str, Stamp]) -> bool:
        """Whether it was made of these very stamps."""
        same = self._stamps.keys() == stamps.keys()
        return same and all(self._stamps[name] is stamp for name, stamp in stamps.items())


class BaseDigests:
    """The digests of the learner's base weights, computed when they are first asked for."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, str]] = {}
        self._proof = FolderProof({})

    def of(self, source: WeightSource) -> dict[str, tuple[Stamp, str]]:
        """Return the digest of every parameter that no optimizer step changes, with the state that it describes."""
        frozen = {entry.name: entry.parameter for entry in source.entries if is_frozen(entry)}
        fresh = {name: parameter for name, parameter in frozen.items() if not self._knows(name, parameter)}
        digests = Digests()
        for name, parameter in fresh.items():
            digests.add(name, parameter)
        stamps = {name: Stamp.of(parameter) for name, parameter in fresh.items()}
        self._known |= {name: (stamps[name], found) for name, found in digests.of_tensors().items()}
        return {name: self._known[name] for name in frozen}

    def proof(self, known: Mapping[str, tuple[Stamp, str]]) -> FolderProof:
        """Return the proof of a folder that has all of what `of` returned; one and the same while that is the same."""
        stamps = {name: stamp for name, (stamp, _) in known.items()}
        if not self._proof.is_of(stamps):
            self._proof = FolderProof(stamps)
        return self._proof

    def _knows(self, name: str, parameter: Tensor) -> bool:
        return name in self._known and self._known[name][0].still_describes(parameter)


def is_frozen(entry: WeightEntry) -> bool:
    """Whether an entry's parameter stays as it was loaded: it does not train, or an adapter trains in its place."""
    return entry.change is not None or not entry.trains


def prove_folder(client: ServerClient, source: WeightSource, own: BaseDigests) -> FolderProof | str:
    """Return the proof that a server's folder has the learner's base weights, or why it cannot merge.

    Raises:
        ServerError: the server does not answer.
    """
    known = own.of(source)
    asked = [(entry.name, dtype_name(entry.parameter.dtype)) for entry in source.entries if entry.name in known]
    try:
        found: Mapping[str, str] = client.post(FOLDER_ROUTE, PHASE, body={"tensors": asked})["digests"]
    except ServerError as error:
        if error.status is None:
            raise
        return error.detail
    wrong = [name for name, (_, digest) in known.items() if found.get(name) != digest]
    if wrong:
        more = f" and {len(wrong) - NAMED_TENSORS} more" if len(wrong) > NAMED_TENSORS else ""
        named = ", ".join(wrong[:NAMED_TENSORS]) + more
        return f"its model folder has other base weights than the learner: {named}"
    return own.proof(known)
