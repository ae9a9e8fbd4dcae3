"""Weights are pushed on demand, once for each optimizer step, and a failed push never counts."""

from types import SimpleNamespace

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_api.vllm import ServerAddress, VllmSync
from stage2_trainer.sync.fleet import push as full_push
from stage2_trainer.sync.fleet.adapter import resolve_mode
from stage2_trainer.sync.fleet.delivery import Shipment
from stage2_trainer.sync.fleet.push import FullPush, WeightSync
from stage2_trainer.sync.fleet.report import DigestError, SyncReport
from stage2_trainer.sync.fleet.server import ServerSession, Update
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource, held_after, merged_weights
from stage2_trainer.wire.errors import ServerError

MODEL = torch.nn.Linear(1, 1)
LOST = ServerError("http://b:8000", "push", "went away")
REFUSED = ServerError("http://s", "load adapter", "rank too high", status=400)


class Recorder:
    """A push that only counts, or fails."""

    def __init__(self, **fields):
        self.versions = []
        self.error = None
        self.fields = fields

    def push(self, model, *, version):
        if self.error is not None:
            raise self.error
        self.versions.append(version)
        fields = {name: value[version] if isinstance(value, dict) else value for name, value in self.fields.items()}
        return SyncReport.create(version, 1.25, ["http://a", "http://b"], **fields)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def adapters():
    return Recorder(adapter={step: f"policy-{step}" for step in range(9)})


def test_weights_are_pushed_once_for_each_step(recorder):
    policy = WeightSync("full", full=recorder.push)
    reports = [policy.ensure_synced(MODEL, step) for step in (0, 0, 1, 1, 1, 4)]
    assert recorder.versions == [0, 1, 4]
    assert [report.version if report else None for report in reports] == [0, None, 1, None, None, 4]


def test_push_is_logged_with_size_and_servers(caplog):
    caplog.set_level("INFO")
    WeightSync("full", full=Recorder(bytes=45_600_000, tensors=7).push).ensure_synced(MODEL, 3)
    assert "weights of step 3 on 2 servers: " in caplog.text
    assert ", 7 tensors, 45.6 MB each, 1.25 s" in caplog.text


def test_failed_push_is_repeated(recorder):
    policy = WeightSync("full", full=recorder.push)
    policy.ensure_synced(MODEL, 3)
    recorder.error = LOST
    with pytest.raises(ServerError):
        policy.ensure_synced(MODEL, 4)
    recorder.error = None
    assert policy.ensure_synced(MODEL, 3).version == 3, "servers may hold either"
    assert policy.ensure_synced(MODEL, 4).version == 4


def test_lost_server_makes_push_of_same_step_due_again(recorder):
    policy = WeightSync("full", full=recorder.push)
    policy.ensure_synced(MODEL, 2)
    policy.invalidate()
    policy.ensure_synced(MODEL, 2)
    assert recorder.versions == [2, 2]


def test_push_count_distinguishes_pushes_of_same_version(recorder):
    policy = WeightSync("full", full=recorder.push)
    counts = [policy.ensure_synced(MODEL, 2).pushes]
    policy.invalidate()
    recorder.error = LOST
    with pytest.raises(ServerError):
        policy.ensure_synced(MODEL, 2)
    recorder.error = None
    counts += [policy.ensure_synced(MODEL, step).pushes for step in (2, 3)]
    assert counts == [1, 2, 3]


class Proofs:
    """A prover that notes what is asked of it."""

    gap = 0.0

    def __init__(self):
        self.calls = []

    def prove_push(self, model, *, step, adapter):
        self.calls.append((step, adapter))

    def require_next(self):
        self.calls.append("next")


def test_every_push_is_offered_for_proof_and_required_after_lost_server(recorder, adapters):
    prover = Proofs()
    policy = WeightSync("auto", full=recorder.push, adapter=adapters.push, prover=prover)
    policy.ensure_synced(MODEL, 0)
    policy.invalidate()
    adapters.error = REFUSED
    policy.ensure_synced(MODEL, 0)
    assert prover.calls == [(0, "policy-0"), "next", "next", (0, None)]


def test_push_report_names_pushed_adapter(recorder, adapters):
    policy = WeightSync("adapter", full=recorder.push, adapter=adapters.push)
    assert policy.ensure_synced(MODEL, 3).adapter == policy.report.adapter == "policy-3"
    assert (policy.report.effective_mode, recorder.versions) == ("adapter", [])


def test_refused_adapter_switches_run_to_full_pushes_with_one_warning(recorder, adapters, caplog):
    policy = WeightSync("auto", full=recorder.push, adapter=adapters.push)
    policy.ensure_synced(MODEL, 0)
    adapters.error = REFUSED
    for step in (1, 2, 3):
        policy.ensure_synced(MODEL, step)
    report = policy.report
    assert (report.requested_mode, report.effective_mode, report.adapter) == ("auto", "full", None)
    assert recorder.versions == [1, 2, 3]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "rank too high" in caplog.text


@pytest.mark.parametrize(("error", "fallback"), [(REFUSED, False), (LOST, True)], ids=["no fallback", "only lost"])
def test_adapter_mode_is_kept_without_fallback_or_after_lost_server(recorder, adapters, error, fallback):
    policy = WeightSync("adapter", full=recorder.push, adapter=adapters.push, fallback=fallback)
    adapters.error = error
    with pytest.raises(ServerError, match=error.detail):
        policy.ensure_synced(MODEL, 1)
    adapters.error = None
    assert policy.ensure_synced(MODEL, 1).adapter == "policy-1"
    assert recorder.versions == []


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
def test_sync_mode_auto_resolves_by_lora_support(requested, enable_lora, obstacle, effective, caplog):
    caplog.set_level("INFO")
    assert resolve_mode(requested, enable_lora=enable_lora, obstacle=obstacle) == effective
    assert ("auto resolves to full" in caplog.text) == (requested == "auto" and effective == "full")


@pytest.mark.parametrize(("enable_lora", "obstacle"), [(False, None), (True, "the vision tower has adapters")])
def test_unusable_adapter_mode_is_refused_with_reason_and_advice(enable_lora, obstacle):
    with pytest.raises(ConfigError, match=r"vllm\.sync\.mode") as caught:
        resolve_mode("adapter", enable_lora=enable_lora, obstacle=obstacle)
    (problem,) = caught.value.problems
    assert (obstacle or "enable_lora") in problem.rule
    assert "set it to full" in problem.way_out


def test_update_lost_to_rounding_is_warned_about_once(caplog):
    policy = WeightSync("full", full=Recorder(rounding_kept={0: 1.0, 1: 0.05, 2: 0.2, 3: 0.9}).push)
    for step in range(4):
        policy.ensure_synced(MODEL, step)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "at step 1 servers have 5 % of the adapters' update" in warning
    assert "vllm.sync.rounding to stochastic" in warning


def test_push_phase_shares_include_proof_time():
    report = SyncReport.create(1, 3.0, ["a"], wire_bytes=2 * 10**9, phase_seconds={"pack": 1.0, "send": 1.0})
    whole = report.completed(requested="full", effective="full", prove_s=1.0)
    assert (whole.phases.pack, whole.phases.send, whole.phases.prove) == (0.25, 0.25, 0.25)
    assert whole.gigabytes_per_second == 1.0


@pytest.fixture
def sync(monkeypatch):
    """A full push whose tries end as `outcomes` has it: with a report, an error, or a mismatch and an error."""
    address = ServerAddress("http://127.0.0.1:1", 1)
    full = FullPush([address], token="t", timeout_s=60.0, device=torch.device("cpu"), adapted=False)
    full.outcomes = []

    def push(model, version):
        outcome = full.outcomes.pop(0)
        if outcome == "mismatch":
            full.location.mismatches.append("server http://a:8000: digests differ")
            raise LOST
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(full, "_push_once", push)
    yield full
    full.close()


def end_shared_group(sync):
    sync.fleet._shared = SimpleNamespace(ended=True)


def test_push_is_repeated_after_shared_group_ended(sync):
    end_shared_group(sync)
    sync.outcomes = [LOST, "report", LOST]
    assert sync.push(MODEL, version=1) == "report"
    with pytest.raises(ServerError):
        sync.push(MODEL, version=2)


def test_digest_mismatch_stops_run_even_if_shared_group_ended(sync):
    end_shared_group(sync)
    sync.location.at_server = False  # no adapter trains
    sync.outcomes = ["mismatch"]
    with pytest.raises(DigestError, match="http://a:8000"):
        sync.push(MODEL, version=1)


def test_digest_mismatch_of_earlier_push_is_not_reported_again(sync):
    sync.location.mismatches.append("server http://a:8000: digests differ")
    sync.outcomes = [LOST]
    with pytest.raises(ServerError, match="http://b:8000"):
        sync.push(MODEL, version=2)


def test_digest_mismatch_of_server_merge_moves_merge_to_learner(sync):
    sync.outcomes = ["mismatch", "report"]
    assert sync.push(MODEL, version=1) == "report"
    assert (sync.location.effective, sync.planned().merge) == ("learner", "learner")


def test_shared_group_that_never_formed_is_dropped_after_first_push(sync):
    end_shared_group(sync)
    sync.outcomes = ["report"]
    sync.push(MODEL, version=1)
    assert not sync.fleet.leave_ended_group()


def full_push_of(count, **options):
    addresses = [ServerAddress(f"http://127.0.0.1:{port}", port) for port in range(1, count + 1)]
    return FullPush(addresses, token="t", timeout_s=60.0, device=torch.device("cpu"), **options)


@pytest.mark.parametrize(("count", "adapted", "shared"), [(2, False, False), (3, False, True), (3, True, False)])
def test_servers_share_group_from_configured_count_without_adapter(count, adapted, shared, monkeypatch):
    asked = []
    monkeypatch.setattr(full_push, "Fleet", lambda servers, **options: asked.append(options["one_group"]))
    full_push_of(count, adapted=adapted, how=VllmSync(one_group_from=3))
    assert asked == [shared]


@pytest.mark.parametrize("changed_only", [True, False])
def test_up_to_date_server_is_sent_weights_only_without_changed_only(changed_only):
    full = full_push_of(1, how=VllmSync(changed_only=changed_only, merge="learner"))
    full.close()
    weights = WeightSource((WeightEntry("w", torch.zeros(2), None, trains=False),))
    held = held_after(weights)
    update = Update([SimpleNamespace(held=held, proven_base=None)])
    ((shipment, _),) = full._shipments(weights, update)
    assert shipment.names == (frozenset() if changed_only else weights.names())


def test_push_report_states_whether_any_server_got_all_weights(monkeypatch):
    full, model, said = full_push_of(2), torch.nn.Linear(1, 1).requires_grad_(False), []
    full.close()
    monkeypatch.setattr(full_push, "send", lambda *_: None)
    monkeypatch.setattr(full, "_finish", lambda *_: None)
    for call in ("connect", "begin"):
        monkeypatch.setattr(ServerSession, call, lambda session: None)
    for session in (*full.fleet.sessions, None):
        said.append(full.push(model, version=1).everything)
        if session:
            session.held = held_after(merged_weights(model))
    assert said == [True, True, False]


def test_server_merge_is_digested_once_per_tensor_for_all_shipments():
    merged = []

    class Noted(WeightSource):
        def __iter__(self):
            merged.extend(entry.name for entry in self.entries)
            return super().__iter__()

    weights = Noted(tuple(WeightEntry(name, torch.ones(2), None, trains=True) for name in ("a", "b")))
    digests = Digests()
    shipments = [Shipment(weights, {}, made, made.names(), digests) for made in (weights.only({"a"}), weights)]
    for shipment in shipments:
        shipment.digest_what_servers_merge()
    assert merged == ["a", "b"]
