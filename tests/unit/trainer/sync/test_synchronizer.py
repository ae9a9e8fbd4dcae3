"""The policy syncs on demand, once for each optimizer step."""

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.sync.fleet.adapter import resolve_mode
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.wire.errors import ServerError


class Recorder:
    """A sync that only counts, and fails when told to."""

    def __init__(self):
        self.versions = []
        self.fails = False

    def sync(self, model, *, version):
        if self.fails:
            raise ServerError("http://s", "push", "broken")
        self.versions.append(version)
        return SyncReport.create(version, 0.0, ["http://s"])


@pytest.fixture
def recorder():
    return Recorder()


MODEL = torch.nn.Linear(1, 1)


def test_weights_are_pushed_once_for_each_step(recorder):
    policy = WeightSync("full", full=recorder)
    reports = [policy.ensure_synced(MODEL, step) for step in (0, 0, 1, 1, 1, 4)]
    assert recorder.versions == [0, 1, 4]
    assert [report.version if report else None for report in reports] == [0, None, 1, None, None, 4]


def test_a_push_is_told_with_its_size_and_its_servers(recorder, caplog):
    caplog.set_level("INFO")
    pushed = SyncReport.create(3, 1.25, ["http://a", "http://b"], bytes=45_600_000, tensors=7)
    recorder.sync = lambda model, *, version: pushed
    WeightSync("full", full=recorder).ensure_synced(MODEL, 3)
    assert "weights of step 3 on 2 servers: " in caplog.text
    assert ", 7 tensors, 45.6 MB each, 1.25 s" in caplog.text


def test_a_failed_push_is_tried_again_for_the_same_step(recorder):
    policy = WeightSync("full", full=recorder)
    policy.ensure_synced(MODEL, 3)
    recorder.fails = True
    with pytest.raises(ServerError):
        policy.ensure_synced(MODEL, 4)
    recorder.fails = False
    assert policy.ensure_synced(MODEL, 4).version == 4


def test_a_lost_server_makes_the_step_due_again(recorder):
    policy = WeightSync("full", full=recorder)
    policy.ensure_synced(MODEL, 2)
    policy.invalidate()
    policy.ensure_synced(MODEL, 2)
    assert recorder.versions == [2, 2]


class Adapters(Recorder):
    """An adapter sync that a server refuses, or that cannot reach it, when told to."""

    def __init__(self):
        super().__init__()
        self.status = None

    def sync(self, model, *, version):
        if self.fails:
            raise ServerError("http://s", "load adapter", "rank too high", status=self.status)
        self.versions.append(version)
        return SyncReport.create(version, 0.0, ["http://s"], adapter=f"policy-{version}")


def test_an_adapter_is_named_by_the_sync_that_brought_it(recorder):
    policy = WeightSync("adapter", full=recorder, adapter=Adapters())
    assert policy.ensure_synced(MODEL, 3).adapter == policy.report.adapter == "policy-3"
    assert (policy.effective, recorder.versions) == ("adapter", [])


def test_a_refused_adapter_turns_the_run_to_full_syncs_with_one_warning(recorder, caplog):
    adapters = Adapters()
    policy = WeightSync("auto", full=recorder, adapter=adapters)
    policy.ensure_synced(MODEL, 0)
    adapters.fails, adapters.status = True, 400
    for step in (1, 2, 3):
        policy.ensure_synced(MODEL, step)
    assert (policy.effective, policy.report.adapter, recorder.versions) == ("full", None, [1, 2, 3])
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "rank too high" in caplog.text


def test_a_refused_adapter_is_an_error_where_falling_back_is_not_wanted(recorder):
    adapters = Adapters()
    adapters.fails, adapters.status = True, 400
    policy = WeightSync("adapter", full=recorder, adapter=adapters, fallback=False)
    with pytest.raises(ServerError, match="rank too high"):
        policy.ensure_synced(MODEL, 1)
    assert (policy.effective, recorder.versions) == ("adapter", [])


def test_a_lost_server_is_no_reason_to_fall_back(recorder):
    adapters = Adapters()
    adapters.fails = True
    policy = WeightSync("adapter", full=recorder, adapter=adapters)
    with pytest.raises(ServerError):
        policy.ensure_synced(MODEL, 1)
    adapters.fails = False
    assert policy.ensure_synced(MODEL, 1).adapter == "policy-1"


@pytest.mark.parametrize(
    ("requested", "enable_lora", "obstacle", "effective"),
    [
        ("full", True, None, "full"),
        ("adapter", True, None, "adapter"),
        ("auto", True, None, "adapter"),
        ("auto", False, None, "full"),
        ("auto", True, "DoRA", "full"),
    ],
)
def test_modes_resolve_by_what_can_work(requested, enable_lora, obstacle, effective, caplog):
    caplog.set_level("INFO")
    assert resolve_mode(requested, enable_lora=enable_lora, obstacle=obstacle) == effective
    assert ("auto resolves to full" in caplog.text) == (requested == "auto" and effective == "full")


@pytest.mark.parametrize(("enable_lora", "obstacle"), [(False, None), (True, "the vision tower has adapters")])
def test_adapter_mode_that_cannot_work_is_refused_with_reason_and_way_out(enable_lora, obstacle):
    with pytest.raises(ConfigError, match=r"vllm\.sync\.mode") as caught:
        resolve_mode("adapter", enable_lora=enable_lora, obstacle=obstacle)
    (problem,) = caught.value.problems
    assert (obstacle or "enable_lora") in problem.rule
    assert "set it to full" in problem.way_out


def test_an_update_that_rounding_swallows_is_told_once(recorder, caplog):
    kept = {0: 1.0, 1: 0.05, 2: 0.2, 3: 0.9}
    recorder.sync = lambda model, *, version: SyncReport.create(version, 1.0, ["http://a"], rounding_kept=kept[version])
    policy = WeightSync("full", full=recorder)
    for step in kept:
        policy.ensure_synced(MODEL, step)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "at step 1 servers have 5 % of the adapters' update: the rest is lost in the rounding of merged weights, and"
        " rollouts come from an older policy; set custom.extra.rollout_matching.vllm.sync.rounding to stochastic, or"
        " watch sync/rounding_kept grow"
    ]
