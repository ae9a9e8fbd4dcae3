"""What a job's members prove themselves with: certificates that hold in a handshake, and when they are made anew."""

import base64
import ssl
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stage2_api.pod import layout
from stage2_controller.children import manifest
from stage2_controller.job import credentials, names
from stage2_controller.plan.result import Plan
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b

HOSTS = names.certificate_hosts("job-3v1", "team-a")
SERVERS, LEARNER = "job-3v1-rollout.team-a.svc", "job-3v1-learner.team-a.svc"
YEAR_S = credentials.LIFETIME.total_seconds()
OWNER = b.owner(b.job())
NO_TLS = {"tls": {"enabled": False}}


@pytest.fixture(scope="module")
def issued() -> dict[str, str]:
    """A new job's, valid on the day of the test."""
    return credentials.new(HOSTS, datetime.now(UTC))


def shaken(folder: Path, served: Mapping[str, str], role: str, *, authority: str, host: str) -> str:
    """What a handshake in memory ends with: the TLS version, or the client's complaint."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = b.listening(folder, served, role).wrap_bio(to_server, to_client, server_side=True)
    trusting = ssl.create_default_context(cadata=authority)
    client = trusting.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return str(error.verify_message)
    return str(client.version())


@pytest.mark.parametrize(
    ("role", "host"), [(role, host) for role, known in HOSTS.items() for host in known], ids=lambda value: str(value)
)
def test_certificate_is_valid_for_every_hostname_of_its_role(
    issued: dict[str, str], tmp_path: Path, role: str, host: str
) -> None:
    assert shaken(tmp_path, issued, role, authority=issued["ca.crt"], host=host) == "TLSv1.3"


def test_certificate_is_invalid_for_other_role_and_other_job(issued: dict[str, str], tmp_path: Path) -> None:
    for role, host in (("rollout", LEARNER), ("learner", SERVERS), ("rollout", "job-3v2-rollout.team-a.svc")):
        assert "not valid for" in shaken(tmp_path, issued, role, authority=issued["ca.crt"], host=host)


def test_certificates_are_not_trusted_by_another_job(issued: dict[str, str], tmp_path: Path) -> None:
    other = credentials.new(HOSTS, b.NOW)["ca.crt"]
    assert "issuer certificate" in shaken(tmp_path, issued, "rollout", authority=other, host=SERVERS)


def test_ca_private_key_is_not_stored(issued: dict[str, str]) -> None:
    assert set(issued) == {"token", "ca.crt", "rollout.crt", "rollout.key", "learner.crt", "learner.key"}


def test_without_tls_secret_holds_only_token() -> None:
    assert set(credentials.new({}, b.NOW)) == {"token"}


SECRET = manifest.secret(OWNER, b.new_credentials(HOSTS, b.NOW))
TOKEN_ONLY = manifest.secret(OWNER, {"token": "t0ken"})


@pytest.mark.parametrize(
    ("held", "tls", "after", "fits"),
    [
        (SECRET, True, timedelta(0), True),
        (SECRET, True, timedelta(days=334), True),
        (SECRET, True, timedelta(days=336), False),
        (SECRET, True, timedelta(days=400), False),
        (SECRET, False, timedelta(0), False),
        (TOKEN_ONLY, True, timedelta(0), False),
        (TOKEN_ONLY, False, timedelta(days=400), True),
        ({}, True, timedelta(0), False),
        ({"data": {"ca.crt": base64.b64encode(b"no certificate").decode()}}, True, timedelta(0), False),
    ],
    ids=["new", "old", "about to end", "ended", "not wanted", "none", "none wanted", "empty", "something else"],
)
def test_secret_is_usable_until_its_certificates_near_expiry(
    held: Any, tls: bool, after: timedelta, fits: bool
) -> None:
    assert credentials.is_usable(held, tls=tls, now=b.NOW + after) is fits


def standing(made: Plan) -> set[str]:
    """The kinds with pods that the plan wants."""
    return {"Deployment", "Job"} & set(b.kinds(made))


def test_new_job_gets_secret_before_pods() -> None:
    assert b.kinds(b.planned(b.job()))[0] == "Secret"
    assert layout.CA_KEY in b.child(b.planned(b.job()), "Secret")["data"]
    assert set(b.child(b.planned(b.job(**NO_TLS)), "Secret")["data"]) == {"token"}


def test_running_job_keeps_its_certificates() -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw), after_s=YEAR_S / 2)
    assert "Secret" not in b.kinds(made)
    assert made.deletions == ()


def test_expiring_certificates_are_renewed_after_all_pods_have_stopped() -> None:
    raw, late_s = b.job(), YEAR_S - 86_400
    running = b.started(raw)
    stopping = b.planned(raw, running, after_s=late_s)
    assert (standing(stopping), set(stopping.deletions)) == (set(), {"Deployment", "Job"})
    assert b.condition(stopping, "LearnerRunning") == ("False", "SecretRenewed")
    assert "certificates of the job expire soon" in b.message(stopping, "Training")
    ending = replace(running, deployment=None, learner=None)
    assert b.planned(raw, ending, after_s=late_s).deletions == (), "its pods still end"
    gone = b.planned(raw, replace(ending, pods=()), after_s=late_s)
    assert (gone.deletions, gone.again_after_s, standing(gone)) == (("Secret",), 0.0, set())
    anew = b.planned(raw, replace(ending, pods=(), secret=None), after_s=late_s)
    assert b.kinds(anew)[0] == "Secret"
    assert standing(anew) == {"Deployment", "Job"}


def started_without_tls(raw: Any) -> Observed:
    """A job whose pods were made without certificates, from the spec that it has now."""
    before = b.started({**raw, "spec": {**raw["spec"], **NO_TLS}})
    learner = {**(before.learner or {}), "metadata": (b.started(raw).learner or {})["metadata"]}
    return replace(before, learner=learner)


def test_job_running_without_tls_keeps_running_after_upgrade() -> None:
    """Its pods were made by a controller that knew of none."""
    raw = b.job()
    made = b.planned(raw, started_without_tls(raw))
    assert made.deletions == ()
    assert b.condition(made, "LearnerRunning") == ("True", "LearnerStarted")
    assert b.condition(made, "WeightsInSync") == ("True", "SameVersion")


def test_servers_recreated_with_tls_restart_job_whose_secret_has_no_certificates() -> None:
    """Somebody deleted its Deployment: the one that the controller makes now mounts what its Secret lacks."""
    raw = b.job()
    made = b.planned(raw, replace(started_without_tls(raw), deployment=b.started(raw).deployment))
    assert set(made.deletions) == {"Deployment", "Job"}


def test_pending_job_without_certificates_gets_them_before_pods() -> None:
    raw = b.job()
    made = b.planned(raw, Observed(secret=TOKEN_ONLY))
    assert (made.deletions, standing(made)) == (("Secret",), set())


def test_pods_mounting_missing_certificates_are_recreated() -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw, secret=TOKEN_ONLY))
    assert set(made.deletions) == {"Deployment", "Job"}


def test_certificates_without_client_usage_are_renewed_unless_pods_use_them(monkeypatch: Any) -> None:
    """An earlier controller signed them; pods that run with them keep them."""
    raw = b.job()
    with monkeypatch.context() as earlier:
        earlier.setattr(credentials, "_USAGES", credentials._USAGES[:1])
        secret = manifest.secret(OWNER, credentials.new({"rollout": ["a"]}, b.NOW))
    assert credentials.serve_links(SECRET)
    assert b.planned(raw, Observed(secret=secret)).deletions == ("Secret",)
    assert b.planned(raw, b.started(raw, secret=secret)).deletions == ()


def test_deleted_secret_is_recreated_only_after_all_pods_are_gone() -> None:
    """Pods and controller would not trust one another: each poll of the learner failed, and nothing said so."""
    raw = b.job()
    observed = replace(b.started(raw), secret=None)
    made = b.planned(raw, observed)
    assert (made.deletions, "Secret" in b.kinds(made)) == (("Job", "Deployment"), False)
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.SECRET_RENEWED)
    assert "its Secret is gone" in made.status["message"]
    ending = replace(observed, deployment=None, learner=None)
    assert "Secret" not in b.kinds(b.planned(raw, ending))
    assert {"Secret", "Job", "Deployment"} <= set(b.kinds(b.planned(raw, b.NOTHING)))


def emptied(observed: Observed, *, gone: str = "") -> Observed:
    """Deployment and Job are gone, and the pods have ended, but for the roles that are gone, too."""
    metadata = {"deletionTimestamp": "2026-01-02T03:04:05Z"}
    pods = [
        {**pod, "metadata": {**pod["metadata"], **metadata}, "status": {**pod["status"], "phase": "Failed"}}
        for pod in observed.pods
        if pod["metadata"]["labels"][names.LABEL_ROLE] != gone
    ]
    return replace(observed, deployment=None, learner=None, progress=None, pods=tuple(pods))


@pytest.mark.parametrize("gone", ["", "rollout", "learner"])
def test_secret_is_not_recreated_while_any_terminating_pod_remains(gone: str) -> None:
    """A kubelet keeps an immutable Secret for any pod of its node that mounts this name, until the last one is gone.

    New pods were created beside those that had just ended, and got the old content.
    """
    raw, late_s = b.job(), YEAR_S - 86_400
    ending = emptied(b.started(raw), gone=gone)
    deleted, expired = b.planned(raw, replace(ending, secret=None)), b.planned(raw, ending, after_s=late_s)
    for made in (deleted, expired):
        assert (made.deletions, standing(made), "Secret" in b.kinds(made)) == ((), set(), False)
        assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.SECRET_RENEWED)


def test_overdue_pod_that_blocks_new_secret_is_reported() -> None:
    raw = b.job()
    stuck = emptied(b.started(raw), gone="learner")
    stuck = replace(stuck, secret=None, pods=tuple({**pod, "status": {"phase": "Running"}} for pod in stuck.pods))
    raw = b.with_status(raw, b.planned(raw, stuck))
    made = b.planned(raw, stuck, after_s=3600)
    assert b.condition(made, reasons.PODS_ENDED) == ("False", reasons.PODS_OVERDUE)
    assert "pod job-3v1-rollout-x on node node-a has not ended" in b.message(made, reasons.PODS_ENDED)


def test_unreachable_learner_is_reported_with_error() -> None:
    raw = b.job()
    silent = replace(b.started(raw, progress=None), unreachable="https://10.0.0.1:9400/progress: timed out")
    made = b.planned(raw, silent)
    assert made.status["phase"] == reasons.RUNNING
    assert b.condition(made, reasons.LEARNER_REACHABLE) == ("False", reasons.LEARNER_UNREACHABLE)
    assert "timed out" in made.status["message"]
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.LEARNER_UNREACHABLE)
    assert b.condition(b.planned(raw, b.started(raw)), reasons.LEARNER_REACHABLE) is None
    restarted = replace(silent, unreachable=None)
    known = b.condition(b.planned(b.with_status(raw, made), restarted), reasons.LEARNER_REACHABLE)
    assert known == ("False", reasons.LEARNER_UNREACHABLE), "the next controller has asked only once"
    assert b.condition(b.planned(b.with_status(raw, made), b.started(raw)), reasons.LEARNER_REACHABLE) is None
