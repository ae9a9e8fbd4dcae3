"""Errors of the push of weights; importing them takes no torch."""

from __future__ import annotations


class ProofError(RuntimeError):
    """A server answers with other weights than the learner's, although it took the push.

    It is not worth another try: the same push would end the same way.
    """


class DigestError(ProofError):
    """Digests tell that a server has loaded other weights than the learner's: nothing was generated with them."""


class DoubtfulProof(ProofError):
    """A server's answers are farther from the learner's than rounding usually explains, but do not contradict them."""
