"""Objects as the API server holds them, for tests of the plan: take one that works and change what matters."""

import copy
import json
import ssl
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from stage2_api.pod import layout
from stage2_api.pod.report import LearnerReport, SyncedServer, SyncStatus
from stage2_controller.children import build, manifest
from stage2_controller.job import credentials, names
from stage2_controller.job.settings import Settings
from stage2_controller.place.capacity import Snapshot
from stage2_controller.plan.page import plan as make_plan
from stage2_controller.plan.result import Plan
from stage2_controller.state import conditions
from stage2_controller.state.observed import Observed
from tests.unit.api.wrong_jobs import merge_patch

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = Settings(image="stage2/trainer:test", kueue=True)
NODE = "node-a"
NOTHING = Observed()
BLIND = Snapshot(names.Key("team-a", "job-3v1"), {}, sees_nodes=False)
"""The nodes where the controller may not read them."""
Object = dict[str, Any]


def job(name: str = "job-3v1", *, config: Mapping[str, Any] | None = None, **spec: Any) -> Object:
    """A job with three servers and one learner GPU; `spec` replaces fields, `config` merges into spec.config."""
    written: Object = {
        "image": "my/trainer:1",
        "rollout": {"servers": 3, "gpusPerServer": 1, "port": 8000},
        "learner": {"gpus": 1, "backoffLimit": 3},
        "volumes": [{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "data"}}],
        "config": merge_patch(copy.deepcopy(_CONFIG), config or {}),
        **spec,
    }
    metadata = {"name": name, "namespace": "team-a", "uid": f"uid-of-{name}", "generation": 1, "resourceVersion": "1"}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": written}


_CONFIG: Object = {
    "model": {"model": "/data/model"},
    "global_max_length": 2048,
    "training": {"output_dir": "/data/output", "max_steps": 10, "seed": 17},
    "custom": {
        "train_jsonl": "/data/train.jsonl",
        "extra": {"rollout_matching": {"rollout_backend": "vllm", "vllm": {"mode": "server", "max_model_len": 4096}}},
    },
}
COLOCATE = {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": "colocate"}}}}}


def planned(raw: Object, observed: Observed = NOTHING, *, after_s: float = 0) -> Plan:
    """The plan of a pass `after_s` seconds after NOW."""
    return plan(raw, observed, now=NOW + timedelta(seconds=after_s))


def plan(
    raw: Object,
    observed: Observed,
    *,
    settings: Settings = SETTINGS,
    now: datetime = NOW,
    snapshot: Snapshot = BLIND,
) -> Plan:
    """The plan of a pass over a job, parsed now."""
    parsed: Any = build.parse_or_error(raw, settings)
    return make_plan(
        raw, parsed, observed, settings=settings, now=now, new_credentials=new_credentials, snapshot=snapshot
    )


def new_credentials(hosts: Mapping[str, Any], now: datetime) -> Object:
    """A token that a test can name, and certificates, which take a while to make, always the same."""
    return {layout.TOKEN_KEY: "t0ken", **(_CERTIFICATES if hosts else {})}


_CERTIFICATES = {
    key: text
    for key, text in credentials.new(names.certificate_hosts("job-3v1", "team-a"), NOW).items()
    if key != layout.TOKEN_KEY
}


def with_status(raw: Object, made: Plan) -> Object:
    """The job once the plan's status is written."""
    return {**raw, "status": copy.deepcopy(made.status)}


def child(made: Plan, kind: str) -> Object:
    """The plan's only child of a kind."""
    (found,) = [item for item in made.children if item["kind"] == kind]
    return found


def kinds(made: Plan) -> list[str]:
    """The kinds of the plan's children, in order."""
    return [item["kind"] for item in made.children]


def condition(made: Plan, condition_type: str) -> tuple[str, str] | None:
    """(status, reason) of one condition; None if it is absent."""
    found = [item for item in made.status["conditions"] if item["type"] == condition_type]
    return (found[0]["status"], found[0]["reason"]) if found else None


def message(made: Plan, condition_type: str) -> str:
    """The message of one condition."""
    (found,) = [item["message"] for item in made.status["conditions"] if item["type"] == condition_type]
    return str(found)


def pod(role: str, *containers: Object, node: str | None = NODE, name: str = "", **status: Any) -> Object:
    """A pod of job-3v1."""
    labels = manifest.labels("job-3v1", role)
    metadata = {"name": name or f"job-3v1-{role}-x", "namespace": "team-a", "labels": labels, "uid": f"pod-{role}"}
    owner = {"kind": "Job" if role == names.ROLE_LEARNER else "ReplicaSet", "controller": True, "uid": f"parent-{role}"}
    spec = {"nodeName": node} if node else {}
    return {
        "metadata": {**metadata, "creationTimestamp": "2026-01-02T03:04:05Z", "ownerReferences": [owner]},
        "spec": spec,
        "status": {"podIP": "10.0.0.1", "containerStatuses": list(containers), **status},
    }


def up(name: str, *, ready: bool = True, restarts: int = 0, last: Object | None = None) -> Object:
    """The status of a container that runs."""
    return {"name": name, "ready": ready, "restartCount": restarts, "state": {"running": {}}, "lastState": last or {}}


def waiting(name: str, reason: str, text: str = "", *, last: Object | None = None) -> Object:
    """The status of a container that does not run yet, or not again."""
    state = {"waiting": {"reason": reason, "message": text or reason}}
    return {
        "name": name,
        "ready": False,
        "restartCount": 0,
        "image": "my/trainer:1",
        "state": state,
        "lastState": last or {},
    }


def ended(exit_code: int, text: str = "") -> Object:
    """A container state: it ended."""
    return {"terminated": {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", "message": text}}


def down(name: str, exit_code: int, text: str = "") -> Object:
    """The status of a container that ended and is not started again."""
    return {"name": name, "ready": False, "restartCount": 0, "state": ended(exit_code, text), "lastState": {}}


def rollout_pod(*ready: bool) -> Object:
    """The rollout pod with one running container for each argument: whether it answers."""
    return pod(names.ROLE_ROLLOUT, *(up(f"server-{index}", ready=value) for index, value in enumerate(ready)))


def learner_pod(container: Object | None = None) -> Object:
    """The learner's pod, running unless `container` says otherwise."""
    return pod(names.ROLE_LEARNER, container or up("learner"))


def waiting_learner_pod() -> Object:
    """The learner's pod while its first container waits for the servers."""
    first = {**up(names.WAIT_CONTAINER, ready=False), "started": True}
    return pod(names.ROLE_LEARNER, waiting("learner", "PodInitializing"), initContainerStatuses=[first])


def learner_job(made: Plan, *conditions: Object, failed: int = 0) -> Object:
    """The learner Job of a plan as the job controller leaves it."""
    return {**child(made, "Job"), "status": {"conditions": list(conditions), "failed": failed}}


def created(made: Plan, **more: Any) -> Observed:
    """What is observed once the Deployment and the Job of a plan exist; `more` adds or replaces parts."""
    written = next((item for item in made.children if item["kind"] == "Secret"), None) or secret()
    return Observed(
        **{"deployment": child(made, "Deployment"), "learner": learner_job(made), "secret": written, **more}
    )


def secret() -> Object:
    """The Secret of job-3v1."""
    return child(planned(job()), "Secret")


def pods_alone(*pods: Object) -> Observed:
    """What is observed where these pods and the Secret are all that exists of a job."""
    return Observed(secret=secret(), pods=pods)


LOADING = LearnerReport(phase="loading")
"""What a learner answers first."""


def trains(made: Plan, **more: Any) -> Observed:
    """What is observed once the plan's servers answer and its learner trains; `more` adds or replaces parts."""
    files = {kind.lower(): child(made, kind) for kind in ("Service", "NetworkPolicy", "ConfigMap")}
    pods = (rollout_pod(True, True, True), learner_pod())
    return created(made, **{**files, "pods": pods, "progress": report(), "baseline": LOADING, **more})


def refused_by_quota(text: str = "exceeded quota: gpus", *, at: datetime = NOW) -> Object:
    """The status of a Deployment of which the API server takes no pod."""
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": text}
    return {"conditions": [{**failure, "lastTransitionTime": conditions.timestamp(at)}]}


def node_of(made: Plan) -> str | None:
    """The node that a plan chooses; fails if it has no placement."""
    assert made.placement
    return made.placement.node


def job_condition(condition_type: str, reason: str = "", text: str = "") -> Object:
    """A true condition of a batch/v1 Job."""
    return {"type": condition_type, "status": "True", "reason": reason, "message": text}


def report(
    step: int = 4, *, pushed: int = 4, held: tuple[int, ...] = (4, 4, 4), phase: str = "training", **more: Any
) -> LearnerReport:
    """What the learner's /progress answers; `more` replaces fields."""
    urls = [f"https://job-3v1-rollout.team-a.svc:{8000 + index}" for index in range(len(held))]
    servers = [SyncedServer(base_url=url, version=version) for url, version in zip(urls, held, strict=True)]
    sync = SyncStatus(version=pushed, requested_mode="full", effective_mode="full", seconds=0.2, servers=servers)
    parts: Object = {
        "max_steps": 10,
        "loss": 0.5,
        "tokens_per_second": 1200.5,
        "sync": sync,
        "reproducibility": {"rollout_seed": 17},
        "message": "",
    }
    return LearnerReport(step=step, phase=phase, **{**parts, **more})


def started(raw: Object, **more: Any) -> Observed:
    """What is observed of a job whose servers answer and whose learner trains; `more` replaces parts."""
    return trains(planned(raw), **more)


def completed(raw: Object) -> Observed:
    """What is observed of a job whose learner has done its work."""
    observed = started(raw)
    return replace(observed, learner=learner_job(planned(raw, observed), job_condition("Complete")))


def termination(**fields: Any) -> str:
    """A learner's termination message."""
    return json.dumps({**report(phase="failed").document(), **fields})


def owner(raw: Object) -> manifest.Owner:
    """The job as the owner of its children."""
    return manifest.Owner(*(raw["metadata"][key] for key in ("name", "namespace", "uid")))


def edited(raw: Object, **spec: Any) -> Object:
    """The job after somebody wrote other keys of its spec."""
    metadata = {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1}
    return {**raw, "metadata": metadata, "spec": {**raw["spec"], **spec}}


def kubeconfig(path: Path, server: str, **user: str) -> str:
    """Write the configuration of a client of this API server; return its path."""
    document = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": server}}],
        "users": [{"name": "x", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return str(path)


def listening(folder: Path, secret: Mapping[str, str], role: str) -> ssl.SSLContext:
    """The TLS of a server with the certificate that a job's Secret has for a role."""
    (folder / "crt").write_text(secret[layout.certificate_key(role)])
    (folder / "key").write_text(secret[layout.private_key_key(role)])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context
