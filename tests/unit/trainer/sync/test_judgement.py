"""What a probe's log-probabilities prove: rounding passes, other weights do not, and what lies between is a doubt."""

import pytest
import torch

from stage2_trainer.sync.fleet.proof import CONTRADICTION, TAIL_TO_MEAN, Gap, judge, text_tokens
from stage2_trainer.sync.fleet.report import DoubtfulProof, ProofError

TOLERANCE = 0.06
TOKENS = 200


@pytest.fixture
def own():
    torch.manual_seed(0)
    return -torch.rand(TOKENS) * 4


def off_by(own, mean, *, tail=0.0, of=6):
    """An answer whose distance is `mean` everywhere, and `tail` on the last `of` tokens."""
    found = own + mean * torch.where(torch.arange(TOKENS) % 2 == 0, 1.0, -1.0)
    if tail:
        found[-of:] = own[-of:] + tail
    return found


def test_what_rounding_explains_is_a_proof(own):
    (report,) = judge({"server a:1": off_by(own, 0.02)}, own, None, tolerance=TOLERANCE)
    assert report.server == "server a:1"
    assert report.gap.mean == pytest.approx(0.02, rel=1e-4)
    assert report.gap.tokens == TOKENS


def test_one_unlikely_token_that_is_far_off_is_no_reason(own):
    found = off_by(own, 0.01)
    found[7] = own[7] + 2.0
    judge({"server a:1": found}, own, None, tolerance=TOLERANCE)


def test_a_tail_above_its_limit_is_a_doubt_and_far_above_it_a_contradiction(own):
    limit = TOLERANCE * TAIL_TO_MEAN
    with pytest.raises(DoubtfulProof, match="99th percentile"):
        judge({"server a:1": off_by(own, 0.001, tail=1.5 * limit)}, own, None, tolerance=TOLERANCE)
    with pytest.raises(ProofError) as caught:
        judge({"server a:1": off_by(own, 0.001, tail=1.5 * CONTRADICTION * limit)}, own, None, tolerance=TOLERANCE)
    assert not isinstance(caught.value, DoubtfulProof)


def test_a_mean_above_its_limit_is_a_doubt_and_far_above_it_a_contradiction(own):
    with pytest.raises(DoubtfulProof, match="verify_tolerance"):
        judge({"server a:1": off_by(own, 1.1 * TOLERANCE)}, own, None, tolerance=TOLERANCE)
    with pytest.raises(ProofError, match="other weights than those that train") as caught:
        judge({"server a:1": off_by(own, 1.1 * CONTRADICTION * TOLERANCE)}, own, None, tolerance=TOLERANCE)
    assert not isinstance(caught.value, DoubtfulProof)


def test_a_server_that_kept_its_old_weights_is_found_where_limits_alone_would_doubt(own):
    previous = off_by(own, 2.2 * TOLERANCE)
    with pytest.raises(DoubtfulProof):
        judge({"server a:1": previous}, own, None, tolerance=TOLERANCE)
    with pytest.raises(ProofError, match="from those before it") as caught:
        judge({"server a:1": previous}, own, previous, tolerance=TOLERANCE)
    assert not isinstance(caught.value, DoubtfulProof)


def test_weights_that_hardly_moved_cannot_be_told_from_those_before(own):
    previous = off_by(own, 0.5 * TOLERANCE)
    judge({"server a:1": previous}, own, previous, tolerance=TOLERANCE)


def test_a_server_with_the_new_weights_is_not_taken_for_a_stale_one(own):
    judge({"server a:1": off_by(own, 0.9 * TOLERANCE)}, own, off_by(own, -3 * TOLERANCE), tolerance=TOLERANCE)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_contradicts(own, value):
    found = own.clone()
    found[3] = value
    with pytest.raises(ProofError, match="server a:1"):
        judge({"server a:1": found}, own, own, tolerance=TOLERANCE)


def test_the_server_that_contradicts_is_named_and_the_others_are_not(own):
    answers = {"server a:1": own, "server b:1": own - 1, "server c:1": off_by(own, 1.1 * TOLERANCE)}
    with pytest.raises(ProofError) as caught:
        judge(answers, own, None, tolerance=TOLERANCE)
    assert "server b:1" in str(caught.value)
    assert "server a:1" not in str(caught.value)
    assert "server c:1" not in str(caught.value)


@pytest.mark.parametrize("seed", range(20))
def test_rounding_as_it_was_measured_passes_and_a_permutation_does_not(seed):
    torch.manual_seed(seed)
    own = -torch.rand(TOKENS) * 4
    noise = torch.randn(TOKENS) * TOLERANCE * 0.8  # bfloat16's, with some to spare: bench/results/probe_gap.md
    judge({"server a:1": own + noise}, own, None, tolerance=TOLERANCE)
    with pytest.raises(ProofError, match="other weights"):
        judge({"server a:1": own[torch.randperm(TOKENS)]}, own, None, tolerance=TOLERANCE)


def test_image_placeholders_are_not_judged():
    types = torch.tensor([[0, 0, 1, 1, 1, 0, 0]])
    assert text_tokens(types).tolist() == [True, False, False, False, True, True]


def test_the_gap_is_of_absolute_differences():
    gap = Gap.between(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 0.0]))
    assert (gap.mean, gap.tokens) == (1.0, 2)
