"""The policy syncs on demand, once for each optimizer step."""

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.server.errors import ServerError
from stage2_trainer.sync.policy import SyncPolicy
from stage2_trainer.sync.report import SyncReport


class Recorder:
    """A sync that only counts, and fails when told to."""

    def __init__(self):
        self.versions = []
        self.fails = False

    def sync(self, model, *, version):
        if self.fails:
            raise ServerError("http://s", "push", "broken")
        self.versions.append(version)
        return SyncReport(version=version, seconds=0.0, bytes=0, tensors=0, servers=("http://s",))


@pytest.fixture
def recorder():
    return Recorder()


MODEL = torch.nn.Linear(1, 1)


def test_weights_are_pushed_once_for_each_step(recorder):
    policy = SyncPolicy("full", full=recorder)
    reports = [policy.ensure_synced(MODEL, step) for step in (0, 0, 1, 1, 1, 4)]
    assert recorder.versions == [0, 1, 4]
    assert [report.version if report else None for report in reports] == [0, None, 1, None, None, 4]


def test_a_failed_push_is_tried_again_for_the_same_step(recorder):
    policy = SyncPolicy("full", full=recorder)
    policy.ensure_synced(MODEL, 3)
    recorder.fails = True
    with pytest.raises(ServerError):
        policy.ensure_synced(MODEL, 4)
    recorder.fails = False
    assert policy.ensure_synced(MODEL, 4).version == 4


def test_a_lost_server_makes_the_step_due_again(recorder):
    policy = SyncPolicy("full", full=recorder)
    policy.ensure_synced(MODEL, 2)
    policy.invalidate()
    policy.ensure_synced(MODEL, 2)
    assert recorder.versions == [2, 2]


def test_auto_is_full_for_now_and_says_what_was_asked_for(recorder):
    policy = SyncPolicy("auto", full=recorder)
    assert (policy.requested, policy.effective) == ("auto", "full")


def test_adapter_mode_is_refused_with_a_way_out(recorder):
    with pytest.raises(ConfigError, match=r"vllm\.sync\.mode") as caught:
        SyncPolicy("adapter", full=recorder)
    assert "use `full`" in caught.value.problems[0].way_out
