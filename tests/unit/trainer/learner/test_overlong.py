"""Answers that are too long for a row: which fit, where they are cut, and which are skipped."""

from types import SimpleNamespace

import pytest

from stage2_trainer.learner.supervise import Matched, OverlongError, OverlongRule, Supervisor, sample_stats
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Rollout, RolloutRequest
from tests.unit.trainer.learner.harness import ScriptedBackend, sample_tools

PROMPT = 2
ENDS = (4, 8, 12)
WHOLE = Matched(None, Rollout([0] * PROMPT, [0] * ENDS[-1], "", "s", 0, "stop"), None)
MATCHER = SimpleNamespace(
    object_ends=lambda rollout: ENDS,
    match=lambda record, rollout, *, kept: Matched(record, rollout, None, kept),
)


def fitted(length, what, *, appended=1):
    """What a rule makes of the answer. appended: tokens of each object that is cut, and so missed."""

    def encoded_len(matched):
        kept = ENDS[-1] if matched.kept is None else matched.kept
        return PROMPT + kept + appended * sum(end > kept for end in ENDS)

    found = OverlongRule(length, what).fit(WHOLE, MATCHER, encoded_len)
    assert found.skipped or what == "error" or encoded_len(found) <= length
    return found


@pytest.mark.parametrize("what", ["cut", "skip", "error", None])
def test_answer_that_exactly_fills_row_is_unchanged(what):
    assert fitted(PROMPT + ENDS[-1], what) is WHOLE


@pytest.mark.parametrize(
    ("length", "appended", "kept"),
    [(13, 1, 8), (11, 1, 8), (10, 1, 4), (8, 1, 4), (7, 1, 0), (5, 1, 0), (13, 0, 8), (10, 0, 8), (9, 0, 4)],
)
def test_cut_answer_keeps_as_many_objects_as_fit(length, appended, kept):
    cut = fitted(length, "cut", appended=appended)
    assert (cut.kept, cut.skipped) == (kept, False)


@pytest.mark.parametrize(("length", "what"), [(4, "cut"), (13, "skip")])
def test_answer_is_skipped_when_no_object_fits_or_rule_is_skip(length, what):
    assert fitted(length, what).skipped


def test_overlong_answer_without_rule_raises_overlong_error():
    with pytest.raises(OverlongError, match="segment of 14 tokens; at most global_max_length = 13"):
        fitted(13, None)


def one_too_many(record):
    """Answer with the ground truth, and an object that is not there."""
    return serialize_objects([*record.objects, GTObject("ghost", "bbox", (0, 900, 50, 999))])


def test_skipped_answer_is_not_counted_as_cut(encoder, model, records):
    tools, (one, *_) = sample_tools(encoder), records
    chat = tools.prompts.chat(one)
    rollout = ScriptedBackend(encoder, records, one_too_many)._rollout(RolloutRequest(chat), 0)

    def supervised(*rule):
        supervisor = Supervisor(tools, model, overlong=OverlongRule(*rule))
        prompt = supervisor.prompt(one, chat, Stopwatch())
        matched, segment = supervisor.supervise(one, prompt, rollout, Stopwatch())
        return len(segment), segment.stats, sample_stats(matched)

    length, *_ = supervised(1000, "error")
    fits, cut, skipped = supervised(length, "cut"), supervised(length - 1, "cut"), supervised(length - 1, "skip")
    assert (fits[0], cut[0] < length, skipped[0] < length) == (length, True, True)
    for place in (1, 2):
        assert [(found[place].cut, found[place].skipped) for found in (fits, cut, skipped)] == [
            (False, False),
            (True, False),
            (False, True),
        ]
    assert skipped[1].generated == len(rollout.token_ids)
    assert supervised(1, "cut")[1].cut is False, "nothing fits, so it is skipped"
