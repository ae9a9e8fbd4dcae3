"""The proof of a push: rounding passes, other weights do not, a doubt is tried again, and each proof has its turn."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from peft import LoraConfig, get_peft_model

from stage2_trainer.sync.fleet import proof
from stage2_trainer.sync.fleet.proof import (
    CONTRADICTION,
    FLOAT32_TOLERANCE,
    TAIL_TO_MEAN,
    Probe,
    Prover,
    judge,
    learner_logprobs,
    text_tokens,
    wide_logprobs,
)
from stage2_trainer.sync.fleet.report import DoubtfulProof, ProofError, ProvedStep

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


def test_gap_within_rounding_passes_proof(own):
    ((server, gap),) = judge({"server a:1": off_by(own, 0.02)}, own, None, tolerance=TOLERANCE).items()
    assert server == "server a:1"
    assert gap.mean == pytest.approx(0.02, rel=1e-4)
    assert gap.tokens == TOKENS


def test_single_outlier_token_passes_proof(own):
    found = off_by(own, 0.01)
    found[7] = own[7] + 2.0
    assert len(judge({"server a:1": found}, own, None, tolerance=TOLERANCE)) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"mean": 1.1 * TOLERANCE}, "verify_tolerance"),
        ({"mean": 0.001, "tail": 1.5 * TOLERANCE * TAIL_TO_MEAN}, "99th percentile"),
    ],
)
def test_gap_above_limit_is_doubt_and_far_above_limit_is_failed_proof(own, fault, words):
    with pytest.raises(DoubtfulProof, match=words):
        judge({"server a:1": off_by(own, **fault)}, own, None, tolerance=TOLERANCE)
    *_, (name, value) = fault.items()
    with pytest.raises(ProofError, match="other weights than those that train") as caught:
        judge({"server a:1": off_by(own, **{**fault, name: CONTRADICTION * value})}, own, None, tolerance=TOLERANCE)
    assert not isinstance(caught.value, DoubtfulProof)


def test_server_with_old_weights_fails_proof_where_limits_alone_would_doubt(own):
    previous = off_by(own, 2.2 * TOLERANCE)
    with pytest.raises(DoubtfulProof):
        judge({"server a:1": previous}, own, None, tolerance=TOLERANCE)
    with pytest.raises(ProofError, match="from those before it") as caught:
        judge({"server a:1": previous}, own, previous, tolerance=TOLERANCE)
    assert not isinstance(caught.value, DoubtfulProof)


def test_weights_that_moved_less_than_two_limits_are_only_doubtful(own):
    previous = off_by(own, 1.8 * TOLERANCE)
    with pytest.raises(DoubtfulProof):
        judge({"server a:1": previous}, own, previous, tolerance=TOLERANCE)


def test_proof_passes_when_weights_hardly_moved(own):
    previous = off_by(own, 0.5 * TOLERANCE)
    assert len(judge({"server a:1": previous}, own, previous, tolerance=TOLERANCE)) == 1


def test_server_with_new_weights_is_not_judged_stale(own):
    previous = off_by(own, -3 * TOLERANCE)
    assert len(judge({"server a:1": off_by(own, 0.9 * TOLERANCE)}, own, previous, tolerance=TOLERANCE)) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_log_probability_fails_proof(own, value):
    found = own.clone()
    found[3] = value
    with pytest.raises(ProofError, match="server a:1"):
        judge({"server a:1": found}, own, own, tolerance=TOLERANCE)


def test_failed_proof_names_only_failing_server(own):
    answers = {"server a:1": own, "server b:1": own - 1, "server c:1": off_by(own, 1.1 * TOLERANCE)}
    with pytest.raises(ProofError) as caught:
        judge(answers, own, None, tolerance=TOLERANCE)
    assert "server b:1" in str(caught.value)
    assert "server a:1" not in str(caught.value)
    assert "server c:1" not in str(caught.value)


@pytest.mark.parametrize("seed", range(20))
def test_measured_rounding_noise_passes_proof_and_permutation_fails(seed):
    torch.manual_seed(seed)
    own = -torch.rand(TOKENS) * 4
    noise = torch.randn(TOKENS) * TOLERANCE * 0.8  # bfloat16's, with some to spare: bench/results/probe_gap.md
    judge({"server a:1": own + noise}, own, None, tolerance=TOLERANCE)
    with pytest.raises(ProofError, match="other weights"):
        judge({"server a:1": own[torch.randperm(TOKENS)]}, own, None, tolerance=TOLERANCE)


def test_image_placeholder_tokens_are_excluded_from_proof():
    types = torch.tensor([[0, 0, 1, 1, 1, 0, 0]])
    assert text_tokens(types).tolist() == [True, False, False, False, True, True]


IN_DOUBT = 2 * FLOAT32_TOLERANCE
TURNS = 5


@pytest.fixture
def probe():
    ids = torch.arange(2, 60).unsqueeze(0)
    return Probe(messages=[], inputs={"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)})


class Server:
    """A server that answers as the learner does, but for these distances."""

    def __init__(self, model, probe, *distances):
        self.model, self.probe, self.distances = model, probe, list(distances)
        self.asked = 0

    def __call__(self):
        self.asked += 1
        off = self.distances.pop(0) if self.distances else 0.0
        return {"server a": lambda: learner_logprobs(self.model, self.probe.inputs) + off}


@pytest.mark.parametrize(
    ("options", "linear"),
    [(None, F.linear), ({"use_dora": True}, F.linear), (None, zero3_linear_wrap)],
    ids=["the model", "with DoRA", "with what ZeRO-3 leaves in F.linear"],
)
def test_wide_log_probabilities_equal_float32_model(tiny, probe, monkeypatch, options, linear):
    monkeypatch.setattr(F, "linear", linear)
    narrow = copy.deepcopy(tiny).to(torch.bfloat16)
    if options:
        narrow = get_peft_model(narrow, LoraConfig(target_modules=["q_proj", "down_proj"], **options))
    wide = wide_logprobs(narrow, probe.inputs)
    exact = learner_logprobs(copy.deepcopy(narrow).float(), probe.inputs)
    rounding = (learner_logprobs(narrow, probe.inputs) - exact).abs().mean()
    assert F.linear is linear
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().mean() < 0.2 * rounding


def test_proof_tolerance_is_calibrated_by_rounding_error(tiny, probe, monkeypatch, caplog):
    narrow = copy.deepcopy(tiny).to(torch.bfloat16)
    off = 0.1
    monkeypatch.setattr(proof, "wide_logprobs", lambda model, inputs: learner_logprobs(model, inputs) + off)
    schedule = Prover(probe, every=1)
    with caplog.at_level(logging.INFO):
        assert schedule.prove(narrow, Server(narrow, probe, 1.9 * off), step=1)
    assert "proofs accept gaps up to 0.2" in caplog.text
    assert schedule.gap == pytest.approx(1.9 * off, rel=1e-3)
    with pytest.raises(ProofError):
        schedule.prove(narrow, Server(narrow, probe, 6 * off), step=2)


def test_wrong_tensor_fails_calibrated_proof(tiny, probe):
    narrow = copy.deepcopy(tiny).to(torch.bfloat16)
    wrong = copy.deepcopy(narrow)
    with torch.no_grad():
        wrong.get_output_embeddings().weight.normal_(0, 1)
    with pytest.raises(ProofError, match="other weights"):
        Prover(probe, every=1).prove(narrow, Server(wrong, probe), step=1)


def test_doubt_cleared_by_second_answer_passes_proof(tiny, probe, caplog):
    server = Server(tiny, probe, IN_DOUBT)
    with caplog.at_level(logging.INFO):
        (gap,) = Prover(probe, every=0).prove(tiny, server, step=1).values()
    assert server.asked == 2
    assert gap.mean == 0
    assert "not yet proved, attempt 1 of 2" in caplog.text
    assert "proved: server a" in caplog.text


def test_unresolved_doubt_continues_run_and_next_sync_is_proved(tiny, probe):
    server = Server(tiny, probe, IN_DOUBT, IN_DOUBT)
    schedule = Prover(probe, every=0)
    assert schedule.prove(tiny, server, step=1) == {}
    assert len(schedule.prove(tiny, server, step=1)) == 1
    assert schedule.prove(tiny, server, step=1) == {}  # not asked any more: the first sync is proved, and every=0
    assert server.asked == 3


def test_failed_proof_is_not_retried_and_next_sync_is_proved(tiny, probe):
    server = Server(tiny, probe, 1.0)
    schedule = Prover(probe, every=100)
    with pytest.raises(ProofError, match="server a"):
        schedule.prove(tiny, server, step=1)
    assert server.asked == 1
    assert len(schedule.prove(tiny, server, step=1)) == 1


def test_newest_proved_step_excludes_doubtful_and_failed_proofs(tiny, probe):
    proved, found = ProvedStep(), []
    schedule = Prover(probe, every=2, proved=proved)
    server = Server(tiny, probe, 0.0, IN_DOUBT, IN_DOUBT)
    for step in range(4):
        schedule.prove(tiny, server, step=step)
        found.append(proved.step)
    assert found == [0, 0, 0, 3]  # 1: it was not asked; 2: in doubt
    schedule.require_next()
    with pytest.raises(ProofError):
        schedule.prove(tiny, Server(tiny, probe, 1.0), step=4)
    assert proved.step == 3


def test_server_with_weights_of_last_proof_fails_next_proof(tiny, probe):
    moved = copy.deepcopy(tiny)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    kept, new = (learner_logprobs(model, probe.inputs) for model in (tiny, moved))
    schedule = Prover(probe, every=1, tolerance=float((new - kept).abs().mean()) / 2.5)  # in doubt by itself
    schedule.prove(tiny, Server(tiny, probe), step=1)
    with pytest.raises(ProofError, match="from those before it"):
        schedule.prove(moved, Server(tiny, probe), step=2)


@pytest.mark.parametrize(("every", "proved"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_first_sync_and_every_kth_sync_are_proved(tiny, probe, every, proved):
    schedule, server = Prover(probe, every=every), Server(tiny, probe)
    assert [turn for turn in range(TURNS) if schedule.prove(tiny, server, step=turn)] == proved


def test_proof_ignores_image_placeholder_tokens_of_server(tiny, probe):
    types = torch.zeros_like(probe.inputs["input_ids"])
    types[0, 10:50] = 1
    asked = Probe([], {**probe.inputs, "mm_token_type_ids": types})
    off = torch.zeros(types.shape[1] - 1)
    off[9:49] = 5.0
    model_inputs = {"input_ids": asked.inputs["input_ids"]}
    schedule = Prover(asked, every=0)
    schedule.probe = Probe([], model_inputs)  # this text-only prompt has no pixels for its placeholders
    answers = {"server a": lambda: learner_logprobs(tiny, model_inputs) + off}
    (gap,) = schedule.prove(tiny, lambda: answers, step=1).values()
    assert gap.tokens == types.shape[1] - 1 - 40


def test_scoring_in_chunks_equals_scoring_at_once(tiny, probe, monkeypatch):
    at_once = learner_logprobs(tiny, probe.inputs)
    monkeypatch.setattr(proof, "SCORED_AT_ONCE", 7)
    assert torch.equal(learner_logprobs(tiny, probe.inputs), at_once)
    assert len(at_once) == probe.inputs["input_ids"].shape[1] - 1


def test_configured_proof_tolerance_is_used(tiny, probe):
    assert len(Prover(probe, every=1, tolerance=1e4).prove(tiny, Server(tiny, probe, 1.0), step=1)) == 1
    with pytest.raises(ProofError, match=r"limits 1e-09.*vllm\.sync\.verify_tolerance"):
        Prover(probe, every=1, tolerance=1e-9).prove(tiny, Server(tiny, probe, 1e-3), step=1)
