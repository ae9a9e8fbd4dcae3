"""Servers are asked all at once: the first of many that stand still would keep the others waiting."""

import threading
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from stage2_api.vllm import ServerAddress
from stage2_trainer.rollouts import build
from stage2_trainer.sync.fleet.merge_location import FOLDERS_AGREE
from stage2_trainer.sync.fleet.push import FullSync
from stage2_trainer.wire import client
from stage2_trainer.wire.background import all_at_once
from stage2_trainer.wire.errors import ServerError

COUNT = 5
URLS = [f"http://127.0.0.1:{port}" for port in range(1, 1 + COUNT)]


@pytest.fixture
def meet():
    """A call that returns once it runs for all servers."""
    barrier = threading.Barrier(COUNT)
    return lambda *_, **__: barrier.wait(20)


def test_results_keep_their_order_and_the_first_failure_is_raised():
    assert all_at_once(str, range(30)) == [str(i) for i in range(30)]
    with pytest.raises(ZeroDivisionError):
        all_at_once(lambda i: 1 // i, [1, 0])


def test_health_and_state(meet, monkeypatch):
    def get(client, path, phase):
        meet()
        return {"weight_version": "3"}

    monkeypatch.setattr(client.ServerClient, "get", get)
    client.wait_until_healthy(URLS, "t", timeout_s=1)
    client.wait_until_healthy(URLS, "t")


def test_who_is_not_healthy_is_named(meet, monkeypatch):
    def get(client, path, phase):
        meet()
        if client.base_url in URLS[1:3]:
            raise ServerError(client.base_url, phase, "no answer in time")

    monkeypatch.setattr(client.ServerClient, "get", get)
    with pytest.raises(ServerError, match=rf"{URLS[1]}.*not healthy within 0 s.*{URLS[2]}") as caught:
        client.wait_until_healthy(URLS, "t", timeout_s=0)
    assert URLS[0] not in str(caught.value)


def test_identity(meet, monkeypatch):
    monkeypatch.setattr(build, "describe", lambda processor: {})
    monkeypatch.setattr(build, "_differences", lambda *_: [] if meet() >= 0 else None)
    build.check_identity([SimpleNamespace(base_url=url) for url in URLS], None, [], [1])


def test_model_folders(meet, monkeypatch):
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    addresses = [ServerAddress(url, 1) for url in URLS]
    sync = FullSync(addresses, token="t", timeout_s=1, device=torch.device("cpu"))
    monkeypatch.setattr(sync.location, "compare_folder", meet)
    sync.choose_location(model)
    assert (sync.planned().merge, sync.planned().merge_reason) == ("server", FOLDERS_AGREE)
