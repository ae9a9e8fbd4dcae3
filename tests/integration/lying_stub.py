"""The CPU stub, as a server that lies: from one update on it has other weights than it was sent, and says nothing.

    main("keeps", 5, [...])    # from its fifth update on: it takes note of tensors, and goes on with those it has
    main("changes", 5, [...])  # what arrives is changed before anybody looks at it

The rest of the arguments are the stub's.
"""

import itertools
import sys

import torch

from stage2_trainer.serve.stub import app
from stage2_trainer.serve.stub.model import StubModel
from stage2_trainer.sync.vllm.server_merge import ServerMerge

CHANGE = 0.125


def main(lie: str, first: int, arguments: list[str]) -> None:
    """Serve until terminated."""
    updates, count = itertools.count(1), 0
    update, load_weights = ServerMerge.update, StubModel.load_weights

    def lies() -> bool:
        return count >= first

    def counted(self, header, receive, load):
        nonlocal count
        if "expected" not in header:
            count = next(updates)
        if lie == "changes" and lies():
            return update(self, header, lambda arrived: receive(lambda tensors: arrived(changed(tensors))), load)
        return update(self, header, receive, load)

    def loaded(self, tensors):
        if lie == "keeps" and lies():
            return list(tensors)
        return load_weights(self, tensors)

    ServerMerge.update, StubModel.load_weights = counted, loaded
    sys.argv = ["stub", *arguments]
    app.main()


def changed(tensors):
    """Return tensors of which the first has another number at its beginning."""
    (name, first), *rest = tensors
    other = first.clone()
    with torch.no_grad():
        other.view(-1)[0] += CHANGE
    return [(name, other), *rest]
