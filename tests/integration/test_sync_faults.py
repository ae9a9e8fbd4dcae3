"""What a sync makes of servers that fail: errors that name server and phase, deadlines kept, healthy servers served."""

import signal

import pytest
import torch

from stage2_trainer.sync.tensors.merge import WeightAccess
from stage2_trainer.wire.errors import ServerError
from tests.integration.conftest import patience
from tests.integration.strikes import STANDSTILL_S, strike, version_of
from tests.support.ports import free_port


def test_killed_server_is_named_and_others_get_weights(servers, start_server, make_sync, base, token):
    healthy, lost = servers("stub"), start_server("stub")
    sync = make_sync(healthy, lost)
    sync.push(base, version=1)
    strike(lost, signal.SIGKILL)
    lost.process.wait()
    with pytest.raises(ServerError) as caught:
        sync.push(base, version=2)
    assert caught.value.server == lost.base_url
    assert "ClientConnectorError" in caught.value.detail
    assert version_of(healthy, token) == "2"


@pytest.mark.parametrize("bucket_bytes", [100_000, 2**29])
def test_hanging_server_times_out_and_others_get_weights(servers, start_server, make_sync, base, token, bucket_bytes):
    healthy, frozen = servers("stub"), start_server("stub")
    sync = make_sync(healthy, frozen, timeout_s=patience(STANDSTILL_S), access=WeightAccess(bucket_bytes))
    sync.push(base, version=1)
    strike(frozen, signal.SIGSTOP)
    with pytest.raises(ServerError) as caught:
        sync.push(base, version=2)
    assert caught.value.server == frozen.base_url
    assert "no answer in time" in caught.value.detail
    assert version_of(healthy, token) == "2"
    strike(frozen, signal.SIGCONT)
    sync.push(base, version=3)
    assert {version_of(healthy, token), version_of(frozen, token)} == {"3"}


def test_tensors_unknown_to_server_are_refused_by_name(servers, make_sync, base, token):
    served = servers("stub")
    sync = make_sync(served)
    sync.push(base, version=1)
    other = torch.nn.ModuleDict({"stranger": torch.nn.Linear(2, 2)})
    with pytest.raises(ServerError, match=r"phase push.*stranger\.weight"):
        sync.push(other, version=2)
    assert version_of(served, token) == "1"
    sync.push(base, version=3)
    assert version_of(served, token) == "3"


def test_push_to_unreachable_server_fails_at_once(make_sync, base, servers):
    nowhere = type(servers("stub"))(**{**vars(servers("stub")), "base_url": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(ServerError, match="phase connect"):
        make_sync(nowhere).push(base, version=1)
