"""An exported model, served by plain `vllm serve` without our plugin, answers as the learner's model does."""

import contextlib
import os
import sys

import pytest
import torch

from stage2_trainer.export.checkpoint_folder import open_checkpoint
from stage2_trainer.export.model_export import export_model
from stage2_trainer.prepare.coordinate_tokens import prepare
from stage2_trainer.serve.server_command import environment
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE, Gap, learner_logprobs, server_logprobs, text_tokens
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.requests import POLICY_MODEL
from tests.integration.conftest import Served, stop, wait_until_healthy
from tests.integration.policies import grey_probe
from tests.support import forked
from tests.support.ports import free_port
from tests.unit.trainer.export.trained import learner_model, saved, trained
from tests.unit.trainer.prepare.stock_models import mixture_of, stock

pytestmark = pytest.mark.in_turns(3, first=1)


@contextlib.contextmanager
def served_plainly(model, log):
    """Start what `vllm serve` starts with no plugin, and nothing of ours but its environment for a small machine.

    It is a copy of a process that has imported vLLM: nothing of ours is in it but the names of vLLM's modules.
    """
    port = free_port()
    options = ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    options += ["--served-model-name", POLICY_MODEL]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    small = environment(os.environ, "cpu", cores=len(os.sched_getaffinity(0)), servers_here=1)
    with log.open("wb") as out:
        process = forked.start(command, imports=forked.VLLM, env={**small, "VLLM_PLUGINS": ""}, stdout=out)
    served = Served("vllm", f"http://127.0.0.1:{port}", 0, "float32", log, process)
    try:
        wait_until_healthy(served)
        yield served
    finally:
        stop(process)


@pytest.mark.vllm
def test_plain_vllm_with_exported_model_answers_like_learner(tmp_path, model_path):
    """Of other kinds the files have the same names and shapes, and transformers computes the same with them."""
    _assert_answers_as_the_learner(model_path, "dora", tmp_path)


@pytest.mark.vllm
def test_plain_vllm_with_exported_moe_model_answers_like_learner(tmp_path):
    """Trained in full: transformers saves its experts turned around, and vLLM would read them so without a word."""
    torch.manual_seed(3)
    prepare(str(mixture_of(stock(tmp_path / "stock"), tmp_path / "mixture")), tmp_path / "prepared")
    _assert_answers_as_the_learner(tmp_path / "prepared", "full", tmp_path)


def _assert_answers_as_the_learner(base, kind, tmp_path):
    opened = open_checkpoint(saved(trained(base, kind), base, tmp_path / "run"), model=str(base))
    exported = export_model(opened, tmp_path / "out", dtype=torch.float32).folder
    asked = grey_probe(base, tmp_path)
    text = text_tokens(asked.inputs["mm_token_type_ids"])
    with served_plainly(exported, tmp_path / "log") as served:
        assert "stage2" not in served.log.read_text(errors="replace").replace(str(tmp_path), "")
        client = ServerClient(served.base_url, "none", timeout_s=120)
        served_logprobs = server_logprobs(client, asked)[text]
    own = learner_logprobs(learner_model(opened), asked.inputs)[text]
    assert not Gap.between(served_logprobs, own).exceeds(FLOAT32_TOLERANCE)
