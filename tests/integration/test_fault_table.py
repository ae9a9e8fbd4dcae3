"""The fault table: what becomes of fresh rollouts, and of the whole learner, when a server is struck in each phase.

Pushes that are struck are in test_struck_pushes and test_sync_faults, and on vLLM in test_vllm_faults; bad answers in
tests/unit/trainer/rollouts/test_http, ports and tokens in test_serve and test_server_contract.
"""

import contextlib
import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from stage2_api.vllm import ServerAddress
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.rollout_source import GenerationRequest, ServerRollouts
from stage2_trainer.sync.fleet.push import FullPush, WeightSync
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.client import wait_until_healthy
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Sampling
from tests.integration.conftest import patience, stop
from tests.integration.runs import learning
from tests.integration.strikes import STANDSTILL_S, ports_of, strike, version_of
from tests.shapes import make_shapes

pytestmark = pytest.mark.timeout(300)

BUSY_TICKS = 5  # of some fifty that the answers take
CHATS = [[{"role": "user", "content": f"Say {i}."}] for i in range(4)]


@pytest.fixture
def learner(token):
    """A function that returns the rollouts of a learner with these servers, as `server_assembly` puts them together."""
    with contextlib.ExitStack() as stack:

        def make(*served, patience_s=90.0):
            timeout_s = patience(STANDSTILL_S)
            urls = [server.base_url for server in served]
            addresses = [ServerAddress(server.base_url, server.group_port) for server in served]
            full = FullPush(addresses, token=token, timeout_s=timeout_s, device=torch.device("cpu"))
            stack.callback(full.close)
            backend = ServerBackend(urls, token=token, sampling=Sampling(max_new_tokens=200), timeout_s=timeout_s)
            stack.callback(backend.close)
            return ServerRollouts(
                backend,
                WeightSync("full", full=full),
                seed=17,
                wait=lambda: wait_until_healthy(urls, token, timeout_s=patience_s),
                reporter=Reporter(),
            )

        yield make


def generate(rollouts, model, step):
    return rollouts.generate(GenerationRequest(model, CHATS, step, 0, Stopwatch()))


def cpu_ticks(served):
    """What a server has computed, in hundredths of a second."""
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


@contextlib.contextmanager
def when_it_generates(served, rollouts, do):
    """Do something while a server computes answers of the learner's next rollouts."""

    def wait_and_do():
        while rollouts._reporter.current.phase != "rollout":
            time.sleep(0.01)
        idle = cpu_ticks(served)
        while cpu_ticks(served) < idle + BUSY_TICKS:
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    yield
    thread.join()


def restarted(start_server, served):
    served.process.wait()
    return start_server("stub", ports=ports_of(served))


def test_a_server_killed_while_it_generates_is_awaited_and_updated(servers, start_server, learner, base, token):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck)
    before = generate(rollouts, base, 1).rollouts
    rollouts._reporter.update(phase="training")

    def wait():
        restarted(start_server, struck)

    rollouts._wait = wait
    with when_it_generates(struck, rollouts, lambda: strike(struck, signal.SIGKILL)):
        after = generate(rollouts, base, 2)
    assert [one.version for one in after.rollouts] == [2] * len(CHATS)
    assert [one.token_ids for one in after.rollouts] == [one.token_ids for one in before]
    assert after.sync is not None
    assert {version_of(one, token) for one in (healthy, struck)} == {"2"}


def test_a_server_that_hangs_while_it_generates_is_noticed_without_a_limit(servers, start_server, learner, base, token):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck)
    generate(rollouts, base, 1)
    rollouts._reporter.update(phase="training")
    messages = []

    def wait():
        messages.append(rollouts._reporter.current.message)
        strike(struck, signal.SIGCONT)
        wait_until_healthy([healthy.base_url, struck.base_url], token, timeout_s=60)

    rollouts._wait = wait
    with when_it_generates(struck, rollouts, lambda: strike(struck, signal.SIGSTOP)):
        after = generate(rollouts, base, 2)
    assert len(after.rollouts) == len(CHATS)
    assert f"server {struck.base_url}, phase rollout" in messages[0]
    assert "does not respond" in messages[0]
    assert {version_of(one, token) for one in (healthy, struck)} == {"2"}


def test_a_server_killed_while_idle_costs_a_wait_and_nothing_else(servers, start_server, learner, base, token):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck)
    generate(rollouts, base, 1)
    strike(struck, signal.SIGKILL)
    restarted(start_server, struck)
    after = generate(rollouts, base, 2)
    assert {one.version for one in after.rollouts} == {2}
    assert version_of(struck, token) == "2"


def test_a_server_that_does_not_come_back_is_named_when_the_wait_is_over(servers, start_server, learner, base):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck, patience_s=2.0)
    generate(rollouts, base, 1)
    stop(struck.process)
    with pytest.raises(ServerError, match="not healthy within 2 s") as caught:
        generate(rollouts, base, 2)
    assert (caught.value.server, caught.value.phase) == (struck.base_url, "health")


def learner_config(folder: Path, served, model_path, *, held_out: int = 2) -> Path:
    make_shapes(folder / "shapes", train=4, held_out=held_out)
    vllm = {
        "mode": "server",
        "max_model_len": 512,
        "server": {"timeout_s": 5.0, "servers": [{"base_url": served.base_url, "group_port": served.group_port}]},
    }
    config = {
        "model": {"model": str(model_path), "torch_dtype": "float32", "attn_impl": "sdpa"},
        "global_max_length": 1024,
        "tuner": {"train_type": "lora", "lora_rank": 4, "freeze_vit": True, "freeze_aligner": True},
        "training": {
            "output_dir": str(folder / "out"),
            "max_steps": 500,
            "per_device_train_batch_size": 1,
            "effective_batch_size": 1,
            "save_strategy": "no",
        },
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "shapes" / "train.jsonl"),
            "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": {"max_new_tokens": 16, "vllm": vllm}},
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_without_its_server_a_learner_saves_and_exits_with_75(tmp_path, start_server, token_file, model_path):
    served = start_server("stub")
    config, log = learner_config(tmp_path, served, model_path), tmp_path / "learner.log"
    with learning(config, log, STAGE2_TOKEN_FILE=token_file) as process:
        while '"event": "step"' not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        strike(served, signal.SIGKILL)
        assert process.wait(timeout=120) == 75, log.read_text()
    output = log.read_text()
    assert f"server {served.base_url}" in output
    assert "not healthy within 5 s" in output
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    steps = [json.loads(line) for line in (tmp_path / "out" / "stage2_log.jsonl").read_text().splitlines()]
    assert int(checkpoint.name.partition("-")[2]) == max(one["step"] for one in steps if one["event"] == "step")
