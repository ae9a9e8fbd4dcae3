"""Colocated engines in several processes: a contradiction of one ends all, and all together prove a step.

Requests of a tensor-parallel group are gathered and divided again.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import Qwen3VLForConditionalGeneration

from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.process.transformers_compat import disable_cache
from stage2_trainer.rollouts.colocate import EngineProver, TensorParallel
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE, Probe, learner_logprobs
from stage2_trainer.sync.fleet.report import ProofError, ProvedStep
from tests.unit.trainer.conftest import TINY_MODEL
from tests.unit.trainer.learner.processes import run_members

IN_DOUBT = 2 * FLOAT32_TOLERANCE
STOP = None
"""In the place of a distance: answers are not wanted any more."""


def member(rank, folder, every, syncs):
    """syncs: how far the engines of both processes are off, sync by sync."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ids = torch.arange(2, 60).unsqueeze(0)
    probe = Probe(messages=[], inputs={"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)})
    model = Qwen3VLForConditionalGeneration.from_pretrained(TINY_MODEL, dtype=torch.float32)
    disable_cache(model)
    proved, found, said = ProvedStep(), [], ""
    prover = EngineProver(probe, every=every, proved=proved)

    def answered(asked, off):
        if off is STOP:
            raise Interrupted("asked to stop")
        return learner_logprobs(model, asked.inputs) + off

    try:
        for step, off in enumerate(syncs):
            prover.after_sync(model, lambda asked, off=off: answered(asked, off[rank]), step=step)
            found.append(proved.step)
    except (ProofError, Interrupted) as error:
        said = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps([found, said]))
    distributed.destroy_process_group()


def run(folder, every, *syncs):
    """The proved steps after each sync, and the last words, of both processes."""
    run_members(member, folder, str(folder), every, syncs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(300)
def test_a_contradiction_in_one_process_is_met_by_both_and_a_doubt_in_one_is_no_proof(tmp_path):
    first, second = run(tmp_path, 1, (0.0, 0.0), (0.0, IN_DOUBT), (0.0, 0.0), (0.0, 1.0))
    assert first == second
    assert first[0] == [0, 0, 2]
    assert first[1].startswith("learner process 1: after the weight sync, log-probabilities")


@pytest.mark.timeout(300)
def test_after_a_doubt_in_one_process_both_take_their_next_turns_together(tmp_path):
    calm = (0.0, 0.0)
    first, second = run(tmp_path, 3, (0.0, IN_DOUBT), *[calm] * 6)
    assert first == second
    assert first[0] == [None, 1, 1, 1, 4, 4, 4]


@pytest.mark.timeout(300)
def test_a_process_that_is_asked_to_stop_during_a_proof_holds_nobody_up(tmp_path):
    (steps, said), (other_steps, other_said) = run(tmp_path, 1, (0.0, 0.0), (STOP, 0.0))
    assert (steps, said) == ([0], "asked to stop")
    assert (other_steps, other_said) == ([0, 0], "")


COUNTS = (2, 0, 1, 3)


def gathering(rank, folder):
    """One of two groups of two processes, each with requests of its own."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(COUNTS))
    mine = [f"{rank}.{i}" for i in range(COUNTS[rank])]
    everyone, own = TensorParallel(2).together(mine)
    Path(folder, f"{rank}.json").write_text(json.dumps([mine, everyone, everyone[own]]))
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_every_member_sees_its_whole_group_and_keeps_its_own(tmp_path):
    run_members(gathering, tmp_path, str(tmp_path), count=len(COUNTS))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(COUNTS))]
    assert all(mine == kept for mine, _, kept in found)
    assert found[0][1] == found[1][1] == ["0.0", "0.1"]
    assert found[2][1] == found[3][1] == ["2.0", "3.0", "3.1", "3.2"]
