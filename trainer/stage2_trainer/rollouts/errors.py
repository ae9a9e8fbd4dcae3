"""Errors that end a run because of its samples or answers; importing them takes no torch."""

from __future__ import annotations

from stage2_api.errors import ConfigError
from stage2_trainer.sync.fleet.report import ProofError


class RunawayError(ConfigError):
    """Answers have more objects, or are cut more often, than a person allows. All learner processes meet it."""


class TooManyBadSamples(ConfigError):
    """More samples were set aside than a person allows. All learner processes meet it."""


class VersionError(ProofError):
    """Answers come from the weights of another version than was asked; nothing was trained on them."""


class BadStepError(RuntimeError):
    """All samples of a step or an evaluation were set aside, as where a mount is lost. All processes meet it.

    Another start resumes from the last whole step.
    """
