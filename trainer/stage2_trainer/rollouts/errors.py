"""Errors that end a run because of its samples or answers; light, for whoever reads them must not wait for torch."""

from __future__ import annotations

from stage2_api.errors import ConfigError


class RunawayError(ConfigError):
    """Answers have more objects, or are cut more often, than a person allows. All learner processes meet it."""


class TooManyBadSamples(ConfigError):
    """More samples were set aside than a person allows. All learner processes meet it."""


class BadStepError(RuntimeError):
    """All samples of a step, or of an evaluation, were set aside: the fault is not theirs. All processes meet it.

    A lost mount comes back: another start goes on from the last whole step.
    """
