"""The error of runs that long answers end; a module of its own: what reads it must not wait for torch."""

from __future__ import annotations

from stage2_api.errors import ConfigError


class RunawayError(ConfigError):
    """Answers have more objects, or are cut more often, than a person allows. All learner processes meet it."""
