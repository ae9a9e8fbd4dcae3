"""The error of a number that is none: it ends a run before it reaches a weight or a checkpoint."""

from __future__ import annotations


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a weight is infinite or no number; the optimizer has not stepped, and nothing was saved.

    Another start may not meet it: it goes on from the last checkpoint, all of whose weights were finite.
    """
