"""The fault table: what becomes of fresh rollouts, and of the whole learner, when a server is struck in each phase.

Pushes that are struck are in test_struck_pushes and test_sync_faults, and on vLLM in test_vllm_faults; bad answers in
tests/unit/trainer/rollouts/test_http, ports and tokens in test_serve and test_server_contract.
"""

import asyncio
import contextlib
import itertools
import json
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from stage2_api.vllm import ServerAddress
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.members import Members
from stage2_trainer.rollouts.rollout_source import GenerationRequest, ServerRollouts
from stage2_trainer.sync.fleet.push import FullPush, WeightSync
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.client import wait_until_healthy
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Sampling
from tests.integration.conftest import LONG_S, patience, stop
from tests.integration.runs import learning
from tests.integration.strikes import STANDSTILL_S, ports_of, strike, version_of
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(5, apart=True)
LEARNER_TIMEOUT_S = 10.0  # for which it waits for its last server
BUSY_TICKS = 5  # of some fifty that the answers take
CHATS = [[{"role": "user", "content": f"Say {i}."}] for i in range(4)]


@pytest.fixture
def learner(token):
    """A function that returns the rollouts of a learner with these servers, as `server_assembly` puts them together."""
    with contextlib.ExitStack() as stack:

        def make(*served, patience_s=90.0, temperature=0.0, timeout_s=LONG_S):
            addresses = [ServerAddress(server.base_url, server.group_port) for server in served]
            full = FullPush(addresses, token=token, timeout_s=timeout_s, device=torch.device("cpu"))
            stack.callback(full.close)
            urls = [server.base_url for server in served]
            sampling = Sampling(max_new_tokens=200, temperature=temperature)
            backend = ServerBackend(urls, token=token, sampling=sampling, timeout_s=timeout_s)
            stack.callback(backend.close)

            def wait(found, timeout_s=patience_s):
                wait_until_healthy([one.base_url for one in found], token, timeout_s=timeout_s, some_after_s=0)
                return found

            def tell(found):
                full.fleet.set_servers(found)
                backend.set_servers([one.base_url for one in found])

            members = Members(
                addresses,
                listed=lambda: addresses,
                greet=lambda one: wait([one], 0) and None,
                wait=wait,
                on_change=tell,
            )
            return ServerRollouts(
                backend,
                WeightSync("full", full=full.push),
                seed=17,
                wait=lambda error: members.follow(error.servers | backend.lost),
                follow=lambda: members.follow(backend.lost),
                reporter=Reporter(),
            )

        yield make


def generate(rollouts, model, step, expected=()):
    return rollouts.generate(GenerationRequest(model, CHATS, step, 0, Stopwatch(), expected=expected))


def cpu_ticks(served):
    """What a server has computed, in hundredths of a second."""
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


@contextlib.contextmanager
def when_it_generates(served, do):
    """Do something once, while a server computes the first answer that the block asks of it."""
    ask, asked = ServerBackend._request, []

    async def request(self, server, *arguments):
        if server != served.base_url or asked:
            return await ask(self, server, *arguments)
        asked.append(server)
        idle = cpu_ticks(served)
        answer = asyncio.create_task(ask(self, server, *arguments))
        while cpu_ticks(served) < idle + BUSY_TICKS and not answer.done():
            await asyncio.sleep(0.01)
        assert not answer.done()
        do()
        return await answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ServerBackend, "_request", request)
        yield


def restarted(start_server, served):
    served.process.wait()
    return start_server("stub", ports=ports_of(served))


def test_sampled_answers_do_not_depend_on_division_of_requests(servers, start_server, learner, base):
    rollouts = learner(servers("stub"), start_server("stub"), temperature=1.0)
    divisions = [generate(rollouts, base, 1, expected).rollouts for expected in ((), [9, 1, 1, 1])]
    evenly, by_length = [[(one.token_ids, one.seed) for one in found] for found in divisions]
    assert len({tuple(ids) for ids, _ in evenly}) == len(CHATS)
    assert by_length == evenly
    assert len({tuple(one.server for one in found) for found in divisions}) == len(divisions)


def test_run_continues_without_server_killed_during_generation(servers, start_server, learner, base, token):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck)
    before = generate(rollouts, base, 1).rollouts
    assert {one.server for one in before} == {healthy.base_url, struck.base_url}
    with when_it_generates(struck, lambda: strike(struck, signal.SIGKILL)):
        after = generate(rollouts, base, 2)
    assert {(one.version, one.server) for one in after.rollouts} == {(2, healthy.base_url)}
    assert [one.token_ids for one in after.rollouts] == [one.token_ids for one in before]
    restarted(start_server, struck)
    steps = itertools.count(3)
    while generate(rollouts, base, step := next(steps)).origin["servers"] == [healthy.base_url]:
        time.sleep(0.05)
    assert {version_of(one, token) for one in (healthy, struck)} == {str(step)}, "it has everything again"


def test_server_that_hangs_during_generation_is_detected_without_request_limit(servers, start_server, learner, base):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck, timeout_s=patience(STANDSTILL_S))
    generate(rollouts, base, 1)
    with when_it_generates(struck, lambda: strike(struck, signal.SIGSTOP)):
        after = generate(rollouts, base, 2)
    assert {one.server for one in after.rollouts} == {healthy.base_url}
    assert generate(rollouts, base, 3).origin["servers"] == [healthy.base_url], "nobody waits for it"


def test_server_killed_while_idle_is_used_again_after_restart(servers, start_server, learner, base, token):
    healthy, struck = servers("stub"), start_server("stub")
    rollouts = learner(healthy, struck)
    generate(rollouts, base, 1)
    strike(struck, signal.SIGKILL)
    restarted(start_server, struck)
    after = generate(rollouts, base, 2)
    assert {one.version for one in after.rollouts} == {2}
    assert version_of(struck, token) == "2"


def test_loss_of_last_server_ends_run_and_names_it_after_deadline(start_server, learner, base):
    struck = start_server("stub")
    rollouts = learner(struck, patience_s=10.0)
    generate(rollouts, base, 1)
    stop(struck.process)
    with pytest.raises(ServerError, match="not healthy within 10 s") as caught:
        generate(rollouts, base, 2)
    assert (caught.value.server, caught.value.phase) == (struck.base_url, "health")


def learner_config(folder: Path, servers, model_path, *, timeout_s: float = LONG_S, **training: object) -> Path:
    make_shapes(folder / "shapes", train=4, held_out=2)
    vllm = {
        "mode": "server",
        "max_model_len": 512,
        "server": {"timeout_s": timeout_s, "servers": addresses(servers)},
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
            **training,
        },
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "shapes" / "train.jsonl"),
            "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": {"max_new_tokens": 16, "runaway": {"enabled": False}, "vllm": vllm}},
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_learner_without_server_saves_and_exits_with_75(tmp_path, start_server, token_file, model_path):
    served, timeout_s = start_server("stub"), round(patience(LEARNER_TIMEOUT_S))
    config, log = learner_config(tmp_path, [served], model_path, timeout_s=timeout_s), tmp_path / "learner.log"
    with learning(config, log, STAGE2_TOKEN_FILE=token_file) as process:
        while '"event": "step"' not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        strike(served, signal.SIGKILL)
        assert process.wait() == 75, log.read_text()
    output = log.read_text()
    assert f"server {served.base_url}" in output
    assert f"not healthy within {timeout_s} s" in output
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    steps = [json.loads(line) for line in (tmp_path / "out" / "stage2_log.jsonl").read_text().splitlines()]
    assert int(checkpoint.name.partition("-")[2]) == max(one["step"] for one in steps if one["event"] == "step")


def addresses(servers):
    """The servers as a configuration lists them."""
    return [{"base_url": one.base_url, "group_port": one.group_port} for one in servers]


def answers_of(output: Path) -> dict:
    """The ids of each answer of a run, by step and record."""
    lines = map(json.loads, (output / "rollouts.jsonl").read_text().splitlines())
    return {(one["version"], one["sample_id"], one["seed"]): one["token_ids"] for one in lines}


def wait_until_answered(output: Path, *servers, process) -> None:
    """Return once each of these servers has answered."""
    path = output / "rollouts.jsonl"
    while not all(path.exists() and f'"server": "{one.base_url}"' in path.read_text() for one in servers):
        assert process.poll() is None
        time.sleep(0.05)


def test_answers_do_not_depend_on_servers_that_come_and_go(tmp_path, servers, start_server, token_file, model_path):
    stays, goes, comes = servers("stub"), start_server("stub"), start_server("stub")
    found = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        steps = {"max_steps": 40, "effective_batch_size": 4, "learning_rate": 1e-3}
        config, log = learner_config(folder, [stays, goes], model_path, **steps), folder / "learner.log"
        output = folder / "out"
        with learning(config, log, STAGE2_TOKEN_FILE=token_file) as process:
            if disturbed:
                wait_until_answered(output, stays, goes, process=process)
                strike(goes, signal.SIGKILL)
                document = yaml.safe_load(config.read_text())
                server = document["custom"]["extra"]["rollout_matching"]["vllm"]["server"]
                server["servers"] = addresses([stays, comes])
                config.write_text(yaml.safe_dump(document))
                wait_until_answered(output, comes, process=process)
            assert process.wait() == 0, log.read_text()
        found.append(answers_of(output))
    assert len(found[0]) == 160
    assert found[0] == found[1]
