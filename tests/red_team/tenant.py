"""What a tenant tries who may do nothing but write RolloutMatchingJobs in one namespace."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from stage2_controller.children.network import CONTROLLER_LABELS
from tests.red_team.attempt import Attempt, lives, survived
from tests.red_team.cluster import Cluster, eventually
from tests.unit.charts.test_policy import RISKY

WHO = "tenant"
FORBIDDEN = (
    "get secrets",
    "get pods",
    "get configmaps",
    "get events",
    "get rolloutmatchingjobs --all-namespaces",
    "get nodes",
    "get validatingadmissionpolicies",
    "create token default",
    "create serviceaccount mine",
    "create rolebinding mine --clusterrole=admin --serviceaccount=default:default",
    "create clusterrolebinding mine --clusterrole=cluster-admin --serviceaccount=default:default",
    "run mine --image=x",
    "delete pods --all",
    "delete networkpolicies --all",
    "delete deployments --all",
)
DEPTH = 5_000


def attempts(admin: Cluster, tenant: Cluster, job: Mapping[str, Any]) -> Iterator[Attempt]:
    """Yield what the tenant tries beside `job`, which trains: other verbs, its children, its status, risky jobs."""
    name, before = job["metadata"]["name"], lives(controllers(admin))
    for words in (*FORBIDDEN, f"get secret {name}-token", f"logs job/{name}-learner", f"exec job/{name}-learner -- id"):
        done = tenant.run(*words.split())
        yield Attempt(WHO, f"kubectl {words}", "held" if done.returncode else "GOT", _last(done.stderr))
    patch = '{"status": {"phase": "Succeeded"}}'
    done = tenant.run("patch", "rmj", name, "--subresource=status", "--type=merge", f"--patch={patch}")
    yield Attempt(WHO, "to write a job's status", "held" if done.returncode else "GOT", _last(done.stderr))
    yield from _risky(admin, tenant, job)
    yield from _shapes(admin, tenant, job)
    yield survived(WHO, "to end the controller by any of these", before, lives(controllers(admin)))


def controllers(admin: Cluster) -> list[Any]:
    """Return the controller's own pods, wherever its chart was installed."""
    selector = ",".join(f"{key}={value}" for key, value in CONTROLLER_LABELS.items())
    found: list[Any] = json.loads(admin("get", "pods", "-A", f"--selector={selector}", "--output=json"))["items"]
    return found


def _risky(admin: Cluster, tenant: Cluster, job: Mapping[str, Any]) -> Iterator[Attempt]:
    """Send each risky override of the learner's template; where the API server takes it, the controller must not."""
    paths: dict[str, str] = {}
    for index, (override, path, _) in enumerate(RISKY):
        if path.endswith("image"):  # the chart lets images come from anywhere unless its admin says otherwise
            continue
        risky = _named(job, f"risky-{index}")
        risky["spec"]["learner"]["template"] = override
        done = tenant.run("create", "--validate=false", "-f", "-", stdin=json.dumps(risky))
        if done.returncode:
            yield Attempt(WHO, f"a template with {path}", "held", _last(done.stderr))
        else:
            paths[risky["metadata"]["name"]] = path
    for name, path in paths.items():
        detail = _refused(admin, name)
        children = admin("get", "deployments,jobs,pods", f"--selector=stage2.dev/job={name}", "--output=name").split()
        yield Attempt(WHO, f"a template with {path}", "held" if detail and not children else "GOT", detail)


def _shapes(admin: Cluster, tenant: Cluster, job: Mapping[str, Any]) -> Iterator[Attempt]:
    """Send objects that are nested, large or misshapen; then a good one, which the controller must answer."""
    shapes = {
        "nested": '{"a":' * DEPTH + "1" + "}" * DEPTH,
        "large": json.dumps({str(index): "x" * 1000 for index in range(900)}),
        "misshapen": json.dumps([[], {}, None, 1e300]),
    }
    for what, written in shapes.items():
        odd = _named(job, f"odd-{what}")
        odd["spec"]["config"]["custom"]["extra"]["odd"] = "HERE"
        sent = json.dumps(odd).replace('"HERE"', written)  # deeper than Python writes
        done = tenant.run("create", "--validate=false", "-f", "-", stdin=sent)
        detail = _last(done.stderr) if done.returncode else _refused(admin, odd["metadata"]["name"])
        yield Attempt(WHO, f"a job that is {what}", "held" if detail else "GOT", detail)
    good = _named(job, "good-after-all")
    good["spec"]["suspend"] = True
    tenant("create", "-f", "-", stdin=json.dumps(good))
    phase = eventually(lambda: _status(admin, "good-after-all").get("phase"), why="the controller answers a good job")
    yield Attempt(WHO, "to keep the controller from the next good job", "held" if phase else "GOT", f"it is {phase}")


def _named(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(job))
    made["metadata"] = {"name": name}
    made["spec"]["learner"].pop("template", None)
    return made


def _refused(admin: Cluster, name: str) -> str:
    """Return why the controller refuses a job, once it has a status; empty where it accepts it."""

    def accepted() -> Any:
        conditions = _status(admin, name).get("conditions") or []
        return next((one for one in conditions if one["type"] == "Accepted"), None)

    found = eventually(accepted, why=f"the controller judges {name}")
    return "" if found["status"] == "True" else str(found["message"])[:160]


def _status(admin: Cluster, name: str) -> dict[str, Any]:
    return (admin.get("rmj", name) or {}).get("status") or {}


def _last(detail: str) -> str:
    return (detail.strip().splitlines() or [""])[-1][:160]
