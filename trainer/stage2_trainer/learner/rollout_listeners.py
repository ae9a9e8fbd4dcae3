"""Listeners that matched rollouts are handed to: they write them down, and show some in the run's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from stage2_api.runconfig import RunConfig
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.learner.rollout_documents import rollout_document, sample_document
from stage2_trainer.telemetry.run_log import EventLog, JsonLines
from stage2_trainer.telemetry.timeline import TIMELINE

logger = logging.getLogger(__name__)

CLIPPED_CHARS = 600
EVALUATION_SAMPLES = 8  # rollouts of each evaluation in the run's log; enough for a picture

OnMatched = Callable[[int, Sequence[Matched]], None]
"""Takes the optimizer step and the rollouts that were made in it."""


class ParseFailureLog:
    """A log of the first rollouts that do not parse cleanly (`debug_dump_parse_failures`), cut to 600 characters."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, matched: Sequence[Matched]) -> None:
        """Log what fails to parse among these."""
        for one in matched:
            parsed = one.target.parsed
            if self._left > 0 and (parsed.dropped or parsed.truncated or parsed.notes):
                self._left -= 1
                logger.info(
                    "rollout of %s does not parse (%s): %r; kept: %r",
                    one.record.sample_id,
                    ", ".join([*parsed.dropped, *parsed.notes]) or "truncated",
                    parsed.text[:CLIPPED_CHARS],
                    parsed.prefix_text[:CLIPPED_CHARS],
                )


def log_training_rollouts(config: RunConfig, rollout_log: JsonLines, *others: OnMatched) -> OnMatched:
    """Return a listener of a micro-step's rollouts: each is written down, the first that do not parse are shown.

    others: are told too.
    """
    matching = config.rollout_matching
    failures = ParseFailureLog(matching.debug_dump_max if matching.debug_dump_parse_failures else 0)

    def note(step: int, matched: Sequence[Matched]) -> None:
        with TIMELINE.measure("log"):
            failures(matched)
            for one in matched:
                rollout_log.write({"event": "rollout", "part": "train", "step": step, **rollout_document(one)})
            for other in others:
                other(step, matched)

    return note


def log_held_out_rollouts(log: EventLog, rollout_log: JsonLines, *others: OnMatched) -> OnMatched:
    """Return a listener of an evaluation's rollouts: each is written down, the first few are shown.

    others: are told too.
    """

    def note(step: int, matched: Sequence[Matched]) -> None:
        for one in matched:
            rollout_log.write({"event": "rollout", "part": "held-out", "step": step, **rollout_document(one)})
        for one in matched[:EVALUATION_SAMPLES]:
            log.write("evaluation_sample", {"step": step, **sample_document(one)})
        for other in others:
            other(step, matched)

    return note
