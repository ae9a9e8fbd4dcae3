"""The turns of proofs: a doubt is tried again and stays due, what was said at the last proof is remembered."""

import copy
import logging

import pytest
import torch

from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE, Probe, ProofSchedule, learner_logprobs
from stage2_trainer.sync.fleet.report import ProofError, ProvedStep

IN_DOUBT = 2 * FLOAT32_TOLERANCE
TURNS = 5


@pytest.fixture
def probe():
    ids = torch.arange(2, 60).unsqueeze(0)
    return Probe(messages=[], inputs={"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)})


class Server:
    """A server that answers as the learner does, as far off as it is told."""

    def __init__(self, model, probe, *distances):
        self.model, self.probe, self.distances = model, probe, list(distances)
        self.asked = 0

    def __call__(self):
        self.asked += 1
        off = self.distances.pop(0) if self.distances else 0.0
        return {"server a": lambda: learner_logprobs(self.model, self.probe.inputs) + off}


def test_a_doubt_that_a_second_answer_clears_is_a_proof(tiny, probe, caplog):
    server = Server(tiny, probe, IN_DOUBT)
    with caplog.at_level(logging.INFO):
        (report,) = ProofSchedule(probe, every=0).prove(tiny, server, step=1)
    assert server.asked == 2
    assert report.gap.mean == 0
    assert "in doubt, attempt 1 of 2" in caplog.text
    assert "proved: server a" in caplog.text


def test_a_doubt_that_stays_ends_nothing_and_the_next_sync_is_proved(tiny, probe):
    server = Server(tiny, probe, IN_DOUBT, IN_DOUBT)
    schedule = ProofSchedule(probe, every=0)
    assert schedule.prove(tiny, server, step=1) == []
    assert len(schedule.prove(tiny, server, step=1)) == 1
    assert schedule.prove(tiny, server, step=1) == []  # not asked any more: the first sync is proved, and every=0
    assert server.asked == 3


def test_a_contradiction_is_not_tried_again(tiny, probe):
    server = Server(tiny, probe, 1.0)
    with pytest.raises(ProofError, match="server a"):
        ProofSchedule(probe, every=0).prove(tiny, server, step=1)
    assert server.asked == 1


def test_after_a_contradiction_the_next_sync_is_proved(tiny, probe):
    server = Server(tiny, probe, 1.0)
    schedule = ProofSchedule(probe, every=100)
    with pytest.raises(ProofError):
        schedule.prove(tiny, server, step=1)
    assert len(schedule.prove(tiny, server, step=1)) == 1


def test_the_newest_proved_step_is_told_and_neither_doubt_nor_contradiction_is_one(tiny, probe):
    proved, found = ProvedStep(), []
    schedule = ProofSchedule(probe, every=2, proved=proved)
    server = Server(tiny, probe, 0.0, IN_DOUBT, IN_DOUBT)
    for step in range(4):
        schedule.prove(tiny, server, step=step)
        found.append(proved.step)
    assert found == [0, 0, 0, 3]  # 1: it was not asked; 2: in doubt
    schedule.require_next()
    with pytest.raises(ProofError):
        schedule.prove(tiny, Server(tiny, probe, 1.0), step=4)
    assert proved.step == 3


def test_a_server_that_kept_the_weights_of_the_last_proof_is_found(tiny, probe):
    moved = copy.deepcopy(tiny)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    kept, new = (learner_logprobs(model, probe.inputs) for model in (tiny, moved))
    schedule = ProofSchedule(probe, every=1, tolerance=float((new - kept).abs().mean()) / 2.5)  # in doubt by itself
    schedule.prove(tiny, Server(tiny, probe), step=1)
    with pytest.raises(ProofError, match="from those before it"):
        schedule.prove(moved, Server(tiny, probe), step=2)


@pytest.mark.parametrize(("every", "proved"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_the_first_sync_is_proved_and_then_every_kth(tiny, probe, every, proved):
    schedule, server = ProofSchedule(probe, every=every), Server(tiny, probe)
    assert [turn for turn in range(TURNS) if schedule.prove(tiny, server, step=turn)] == proved


def test_image_placeholders_of_a_server_are_not_looked_at(tiny, probe):
    types = torch.zeros_like(probe.inputs["input_ids"])
    types[0, 10:50] = 1
    asked = Probe([], {**probe.inputs, "mm_token_type_ids": types})
    off = torch.zeros(types.shape[1] - 1)
    off[9:49] = 5.0
    model_inputs = {"input_ids": asked.inputs["input_ids"]}
    schedule = ProofSchedule(asked, every=0)
    schedule.probe = Probe([], model_inputs)  # this text-only prompt has no pixels for its placeholders
    answers = {"server a": lambda: learner_logprobs(tiny, model_inputs) + off}
    (report,) = schedule.prove(tiny, lambda: answers, step=1)
    assert report.gap.tokens == types.shape[1] - 1 - 40
