"""What goes to the chat route, and how strictly its answer is read."""

import json

import pytest

from stage2_api.rollout_matching import RepeatTerminate, RolloutMatching
from stage2_trainer.wire.chat import chat_body, read_answer
from stage2_trainer.wire.requests import RolloutRequest, Sampling

ANSWER = {
    "object": "chat.completion",
    "prompt_token_ids": [1, 2],
    "choices": [{"message": {"content": "{}"}, "token_ids": [3, 4], "finish_reason": "stop", "index": 0}],
    "usage": {},
}
CHOICE = ANSWER["choices"][0]


def test_chat_request_sets_every_sampling_field_explicitly():
    body = chat_body(RolloutRequest(messages=[{"role": "user", "content": "x"}]), Sampling(max_new_tokens=7), seed=9)
    assert body["seed"] == 9
    assert body["return_token_ids"] is True
    named = {"max_tokens", "temperature", "repetition_penalty", "top_p", "top_k", "min_p", "n"}
    assert named | {"presence_penalty", "frequency_penalty"} <= body.keys()


def test_chat_request_has_repetition_detection_only_if_configured():
    rules = RepeatTerminate(enabled=True, ngram_size=8, ngram_repeats=3)
    request = RolloutRequest(messages=[])
    looped = Sampling.from_config(RolloutMatching(repeat_terminate=rules))
    assert chat_body(request, looped, seed=1)["repetition_detection"] == {
        "max_pattern_size": 8,
        "min_pattern_size": 5,
        "min_count": 3,
    }
    assert "repetition_detection" not in chat_body(request, Sampling.from_config(RolloutMatching()), seed=1)
    assert "repetition_detection" not in looped.parameters(), "a server of `swift rollout` knows no such field"


DRAFTS = {"num_draft_tokens": 9, "num_accepted_draft_tokens": 4, "acceptance_histogram": [1, 0, 2]}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, (0, 0, ())),
        ({"metrics": None}, (0, 0, ())),
        ({"metrics": {"speculative_decoding": None}}, (0, 0, ())),
        ({"metrics": {"speculative_decoding": DRAFTS}}, (9, 4, (1, 0, 2))),
    ],
)
def test_chat_answer_is_read_with_draft_token_counts(metrics, expected):
    found = read_answer(json.dumps({**ANSWER, **metrics}).encode()).rollout(server="a", version=0)
    assert (found.prompt_token_ids, found.token_ids) == ([1, 2], [3, 4])
    assert (found.drafted, found.accepted, found.verified) == expected
