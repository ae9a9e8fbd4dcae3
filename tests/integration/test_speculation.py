"""Frame speculation on a real vLLM: fewer decode steps, and the answers of a server without it."""

import re
from collections import Counter

import httpx
import numpy as np
import pytest
from scipy.stats import chi2_contingency

from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.requests import RepetitionDetection, RolloutRequest, Sampling, SeedPlan
from tests.integration.conftest import LONG_S
from tests.integration.policies import image_chat

pytestmark = [pytest.mark.vllm, pytest.mark.in_turns(3)]
SAMPLES = 400
IMPROBABLE = 1e-4
LEAST_EXPECTED = 10
COUNTERS = ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "generation_tokens")


@pytest.fixture(scope="module")
def plain(servers):
    return servers("vllm", load_format="auto", speculation="none")


@pytest.fixture(scope="module")
def speculating(start_module_server):
    return start_module_server("vllm", load_format="auto", speculation="frame")


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """Prompts with images of one to four boxes."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(11)
    found = []
    for i in range(12):
        pixels = np.full((96, 96, 3), random.integers(180, 255, 3), dtype=np.uint8)
        for _ in range(random.integers(1, 5)):
            (top, left), (height, width) = random.integers(0, 64, 2), random.integers(12, 32, 2)
            pixels[top : top + height, left : left + width] = random.integers(0, 255, 3)
        found.append(RolloutRequest(image_chat(folder / f"{i}.png", pixels)))
    return found


def rollouts(served, token, requests, *, seed=5, **sampling):
    fields = Sampling(**{"max_new_tokens": 160, "temperature": 0.0, **sampling})
    with ServerBackend([served.base_url], token=token, sampling=fields, timeout_s=120) as backend:
        return backend.generate(requests, seed_plan=SeedPlan(seed, 0, 0))


def answers(served, token, requests, **options):
    return [one.token_ids for one in rollouts(served, token, requests, **options)]


def counters(served, token):
    known = {"Authorization": f"Bearer {token}"}
    text = httpx.get(f"{served.base_url}/metrics", headers=known, timeout=LONG_S).text
    found = [re.search(rf"^vllm:{name}_total\S* (\S+)", text, re.MULTILINE) for name in COUNTERS]
    return np.array([float(one[1]) if one else 0 for one in found])


def test_greedy_answers_equal_those_without_drafts_in_half_the_steps(plain, speculating, token, requests):
    before = counters(speculating, token)
    found, expected = rollouts(speculating, token, requests), rollouts(plain, token, requests)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    accepted, drafted, generated = counters(speculating, token) - before
    assert 1 - accepted / generated < 0.5
    assert (accepted, drafted) == (sum(one.accepted for one in found), sum(one.drafted for one in found))
    assert {(one.accepted, one.drafted) for one in expected} == {(0, 0)}


def test_penalties_loops_and_length_limits_work_as_without_drafts(plain, speculating, token, requests):
    loops = RepetitionDetection(max_pattern_size=12, min_pattern_size=1, min_count=2)
    for settings in ({"repetition_penalty": 1.2}, {"repetition": loops}, {"max_new_tokens": 23}):
        assert answers(speculating, token, requests, **settings) == answers(plain, token, requests, **settings), (
            settings
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["object_2"], "include_stop_str_in_output": True},
        {"structured_outputs": {"regex": r'\{"object_1": \{"desc": "[a-z ]{1,12}", "bbox_2d": \["<\|coord_[0-9]+\|>"'}},
        {"logprobs": True, "top_logprobs": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_stop_strings_regex_and_logprobs_work_as_without_drafts(plain, speculating, token, requests, fields):
    body = chat_body(requests[0], Sampling(max_new_tokens=60), 5) | fields
    found, expected = (
        httpx.post(f"{one.base_url}{CHAT_ROUTE}", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=120)
        for one in (speculating, plain)
    )
    assert found.status_code == expected.status_code == 200, expected.text
    (choice,), (wanted,) = found.json()["choices"], expected.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (wanted["token_ids"], wanted["finish_reason"])
    if "logprobs" in fields:
        chosen = [[one["logprob"] for one in each["logprobs"]["content"]] for each in (choice, wanted)]
        assert chosen[0] == pytest.approx(chosen[1], abs=1e-4)


def test_seeded_answer_is_same_alone_and_in_batch(speculating, token, requests):
    together = answers(speculating, token, requests, temperature=1.0)
    alone = answers(speculating, token, requests[:1], temperature=1.0)
    assert together[0] == alone[0]
    assert together == answers(speculating, token, requests, temperature=1.0)


def test_sampled_answers_have_same_distribution_as_without_drafts(plain, speculating, token, requests):
    """By the frequencies of first names, first coordinates, lengths and last tokens; a wrong sampler has other ones."""
    drawn = [
        answers(one, token, requests[:1] * SAMPLES, temperature=1.0, max_new_tokens=40, seed=seed)
        for one, seed in ((plain, 1), (speculating, 2))
    ]
    for figure in (lambda ids: tuple(ids[8:11]), lambda ids: tuple(ids[16:17]), len, lambda ids: tuple(ids[-2:])):
        counts = [Counter(map(figure, ids)) for ids in drawn]
        common = [value for value, count in (counts[0] + counts[1]).items() if count >= LEAST_EXPECTED]
        table = [
            [each[value] for value in common] + [SAMPLES - sum(each[value] for value in common)] for each in counts
        ]
        table = np.array(table)[:, np.sum(table, axis=0) > 0]
        assert table.shape[1] == 1 or chi2_contingency(table).pvalue > IMPROBABLE, (figure, table)
