"""A job's servers and its learner over TLS: weights arrive, answers come back, and who listens learns nothing."""

import base64
import contextlib
import json
import ssl
import time
from dataclasses import replace

import httpx
import pytest
import yaml

from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE
from stage2_trainer.wire.client import ServerClient, wait_until_healthy
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Rollout, RolloutRequest, Sampling, SeedPlan
from tests.integration import policies
from tests.integration.conftest import patience
from tests.integration.runs import learning
from tests.integration.test_fault_table import learner_config
from tests.support import certificates
from tests.support.ports import free_port
from tests.support.recorder import recording

pytestmark = pytest.mark.in_turns(2)

HANDSHAKE = 0x16  # RFC 8446, section 5.1: the first byte of a record of this type
STEPS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request, start_module_server, files):
    return start_module_server(request.param, tls=files)


@pytest.fixture
def trusting(files, monkeypatch):
    for name, value in files.environment().items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def overheard(served):
    """The server as it is reached through somebody who listens, and what that one has heard."""
    scheme = served.base_url.partition("://")[0]
    with recording(int(served.base_url.rpartition(":")[2])) as recorder:
        yield replace(served, base_url=f"{scheme}://{certificates.HOST}:{recorder.port}"), recorder.heard


def words_in(heard, token):
    """Which words of a request were heard."""
    words = [token, base64.b64encode(token.encode()).decode(), "Bearer", "uthorization", "HTTP/1.1", "List the shapes"]
    return [word for word in words if word.encode() in heard]


def ask_everything(served, token, sync, policy, probe):
    """What a learner asks of a server in a step: its health, to take weights and to prove them, and an answer."""
    wait_until_healthy([served.base_url], token, timeout_s=patience(30))
    sync.push(policy, version=1)
    client = ServerClient(served.base_url, token, timeout_s=patience(60))
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    sampling = Sampling(max_new_tokens=4)
    with ServerBackend([served.base_url], token=token, sampling=sampling, timeout_s=patience(60)) as backend:
        (answer,) = backend.generate([RolloutRequest(probe.messages)], seed_plan=SeedPlan(1, 0, 0), version=1)
    return answer


def test_weights_and_answers_cross_tls_without_leaking_to_eavesdropper(served, trusting, token, make_sync, base, probe):
    policy = policies.trained(base, "full")
    with overheard(served) as (reached, heard):
        answer = ask_everything(reached, token, make_sync(reached, timeout_s=patience(60)), policy, probe)
    assert isinstance(answer, Rollout)
    assert heard[0] == HANDSHAKE
    assert words_in(heard, token) == []


def test_plain_http_traffic_is_readable_by_eavesdropper(servers, token, make_sync, base, probe):
    with overheard(servers("stub")) as (reached, heard):
        ask_everything(reached, token, make_sync(reached, timeout_s=patience(60)), base, probe)
    assert len(words_in(heard, token)) == 5, "all but the token in base64"


@pytest.mark.parametrize("trusted", ["another authority", "none"])
def test_learner_without_ca_of_job_trusts_no_server(served, token, tmp_path, monkeypatch, trusted):
    """As a learner does whom a stranger's server answers: the stranger is not shown the token."""
    others = certificates.make(tmp_path)
    monkeypatch.delenv("STAGE2_TLS_CA_FILE", raising=False)
    if trusted == "another authority":
        monkeypatch.setenv("STAGE2_TLS_CA_FILE", str(others.authority))
    with overheard(served) as (reached, heard):
        client = ServerClient(reached.base_url, token, timeout_s=30)
        with pytest.raises(ServerError, match="a stranger answers there, or set STAGE2_TLS_CA_FILE"):
            client.weight_version()
        assert words_in(heard, token) == []


def test_plain_http_to_tls_server_is_refused_with_advice(served, token):
    client = ServerClient(served.base_url.replace("https://", "http://"), token, timeout_s=30)
    with pytest.raises(ServerError, match="it answers over TLS alone: write https:// in its base_url"):
        client.weight_version()


def test_learner_trains_and_reports_progress_over_tls(tmp_path, start_server, token, token_file, files, model_path):
    served, port = start_server("stub", tls=files), free_port()
    environment = {**files.environment(), "STAGE2_TOKEN_FILE": token_file, "STAGE2_PROGRESS_PORT": port}
    trusted, log = ssl.create_default_context(cafile=files.authority), tmp_path / "learner.log"
    with overheard(served) as (reached, heard):
        path = learner_config(tmp_path, [reached], model_path)
        config = yaml.safe_load(path.read_text())
        config["training"]["max_steps"] = STEPS
        path.write_text(yaml.safe_dump(config))
        progress = None
        with learning(path, log, **environment) as process:
            while process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    url, header = f"https://{certificates.HOST}:{port}/progress", {"Authorization": f"Bearer {token}"}
                    progress = httpx.get(url, headers=header, trust_env=False, verify=trusted).json()
                time.sleep(0.1)
    assert process.returncode == 0, log.read_text()
    assert progress is not None
    assert progress["phase"] in ("loading", "waiting-for-servers", "syncing", "rollout", "training", "done")
    steps = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"event": "step"')]
    assert [one["sync/version"] for one in steps] == list(range(STEPS))
    assert words_in(heard, token) == []
