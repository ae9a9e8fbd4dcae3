"""Errors of servers and links reach another process whole: a vLLM worker's engine, the other learners of a run."""

import pickle

import pytest

from stage2_trainer.sync.fleet.merge_location import MergeMismatch
from stage2_trainer.wire.errors import LinkError, OtherGroupError, ServerError, join_errors

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "error",
    [
        ServerError(URL, "push", "two\nlines", status=500),
        ServerError(URL, "health", "no answer"),
        MergeMismatch(URL, "compare digests", "other layers", status=409),
        join_errors([ServerError(URL, "push", "a", status=500), ServerError(URL, "push", "b")]),
        OtherGroupError("of-a-dead-learner", "of-this-one"),
        LinkError("the connection broke"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_after_it_crossed(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
