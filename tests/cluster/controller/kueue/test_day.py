"""A day in the life of a shared cluster, in minutes: jobs of many sizes, pods of others, and nodes that come and go.

With STAGE2_DAY_SEED: 200 jobs (STAGE2_DAY_JOBS) on the real scheduler, some of them in two queues of the real Kueue,
while nodes appear, are drained and die, and foreign pods take GPUs and give them back. The jobs follow from the seed,
and so does the order of what happens to nodes and of the foreign pods; how much of it happens to how many jobs follows
from the machine. No GPU may be given or promised twice, no job be half placed for longer than its bound on a node that
answers, none be written without end; every job must end as it was made to, and the controller's memory stay flat.

With STAGE2_DAY_WRITE, what was seen becomes the seed's row in bench/results/day.md.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_controller.place.binding import ATTEMPT_S
from tests.cluster import objects
from tests.cluster.controller import pretended
from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Object, eventually, job
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.kueue.queues import EXAMPLE, QUEUE
from tests.cluster.controller.test_faults import OUTCOMES, fates, finished

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif("STAGE2_DAY_SEED" not in os.environ, reason="minutes of a day, for whoever names a seed"),
]
JOBS = int(os.environ.get("STAGE2_DAY_JOBS", "200"))
GPUS = 8  # of a node; the largest job takes all of them
LEAST, MOST = 4, 9  # nodes
QUEUES = ("", "", "vision", "speech")
QUOTA = 24
FOREIGN = 8  # pods of others at once, at most
BEAT_S = 1.0
NIGHT_S = 1500.0  # for a job to end once it was sent: one that starves does not
SLACK_S = 30.0  # what a busy machine adds to the bound
WRITES = 200  # of one job's children, at most: some move a dozen times
GROWTH_MB = 60.0  # of the controller's memory, from a quarter of the day on: it remembers the manifests of jobs
REST_GROWTH_MB = 20.0  # from the last job on that was sent: nothing new is remembered


@pytest.fixture
def team(kueue: None, kubectl: Kubectl, nodes: FakeNodes) -> Iterator[list[str]]:
    """The first nodes, and two queues that share a flavor of theirs."""
    made = [nodes.add(f"{kubectl.namespace}-{index}", gpus=GPUS, labels=HERE) for index in range(LEAST)]
    written = list(_queues(kubectl.namespace))
    for one in written:
        eventually(lambda one=one: kubectl.run("apply", "-f", "-", stdin=one).returncode == 0, why="Kueue answers")
    yield made
    kubectl("delete", "rmj", "--all", "--timeout=600s")
    for one in reversed(written):
        kubectl("delete", one["kind"], one["metadata"]["name"], "--timeout=600s")


def _queues(namespace: str) -> Iterator[Object]:
    for index, name in enumerate(one for one in QUEUES if one):
        topology, flavor, cluster_queue, local_queue = yaml.safe_load_all(EXAMPLE.read_text())
        own = f"{namespace}-{name}"
        for made in (topology, flavor):
            made["metadata"]["name"] = namespace
        flavor["spec"] |= {"topologyName": namespace, "nodeLabels": HERE}
        cluster_queue["metadata"]["name"] = local_queue["spec"]["clusterQueue"] = own
        local_queue["metadata"] |= {"name": name, "namespace": namespace}
        (offered,) = cluster_queue["spec"]["resourceGroups"][0]["flavors"]
        offered["name"] = namespace
        (gpus,) = [one for one in offered["resources"] if one["name"] == pretended.GPU]
        gpus["nominalQuota"] = QUOTA
        yield from (cluster_queue, local_queue) if index else (topology, flavor, cluster_queue, local_queue)


@dataclass
class Day:
    """What happens on the cluster, drawn by the seed, and what is seen of it."""

    kubectl: Kubectl
    nodes: FakeNodes
    names: list[str]  # of the nodes that take pods
    alive: set[str]  # all nodes, for the hand that plays their kubelets
    seed: int
    foreign: dict[str, float] = field(default_factory=dict)  # when each pod of others goes
    happened: Counter[str] = field(default_factory=Counter)
    double_booked: list[str] = field(default_factory=list)
    half_placed_s: dict[str, float] = field(default_factory=dict)  # the longest time of each half
    ended: dict[str, float] = field(default_factory=dict)  # when each job was first seen to have ended
    looks: int = 0
    _half_since: dict[str, float] = field(default_factory=dict)
    _dead: list[str] = field(default_factory=list)
    _number: int = LEAST

    def __post_init__(self) -> None:
        self._for_pods, self._for_nodes = (random.Random(f"{self.seed} {what}") for what in ("pods", "nodes"))
        self.others = replace(self.kubectl, namespace=f"{self.kubectl.namespace}-others")

    def beat(self) -> None:
        """Let something happen, and look at the cluster."""
        with suppress(*objects.FAILURES):
            self._foreign_pods()
            self._nodes_change()
            self._look()

    def _foreign_pods(self) -> None:
        now = time.monotonic()
        for name in [name for name, until in self.foreign.items() if until < now]:
            del self.foreign[name]
            self.others.run("delete", "pod", name, "--force", "--grace-period=0")
        if len(self.foreign) < FOREIGN and self._for_pods.random() < 0.3:
            self.happened["foreign pod"] += 1
            name = f"foreign-{self.happened['foreign pod']}"
            self.foreign[name] = now + self._for_pods.uniform(5, 40)
            self.others.apply(_foreign_pod(name, self._for_pods.randint(1, 4)))

    def _nodes_change(self) -> None:
        what = self._for_nodes.choices(("nothing", "appears", "drained", "dies"), (40, 2, 1, 1))[0]
        if what == "appears" and len(self.names) < MOST:
            name = f"{self.kubectl.namespace}-{self._number}"
            self._number += 1
            self.names.append(self.nodes.add(name, gpus=GPUS, labels=HERE))
            self.alive.add(name)
        elif what == "drained" and len(self.names) > LEAST:
            node = self._taken_out()
            self.kubectl("cordon", node)
            self._evict(node)
        elif what == "dies" and len(self.names) > LEAST:
            node = self._taken_out()
            self.alive.discard(node)  # its pods' work stops with it
            self.nodes.silence(node)
            self._dead.append(node)
        else:
            if self._dead and self._for_nodes.random() < 0.1:
                self.nodes.remove(self._dead.pop())
            return
        self.happened[f"node {what}"] += 1

    def _taken_out(self) -> str:
        return self.names.pop(self._for_nodes.randrange(len(self.names)))

    def _evict(self, node: str) -> None:
        for pod in self.kubectl.list("pods"):
            if pod["spec"].get("nodeName") == node:
                self.kubectl.run("delete", "pod", pod["metadata"]["name"], "--wait=false")

    def _look(self) -> None:
        there = [pod for pod in self.kubectl.list("pods") if _holds(pod)]
        others = [pod for pod in self.others.list("pods") if _holds(pod)]
        if _overbooked(there, others):  # some of `there` may have ended before one of `others` was bound
            still = {pod["metadata"]["uid"] for pod in self.kubectl.list("pods") if _holds(pod)}
            self.double_booked += _overbooked([pod for pod in there if pod["metadata"]["uid"] in still], others)
        bound: dict[str, dict[str, str]] = {}
        for pod in there:
            if "deletionTimestamp" not in pod["metadata"]:
                labels = pod["metadata"]["labels"]
                bound.setdefault(labels["stage2.dev/job"], {})[labels["stage2.dev/role"]] = pod["spec"]["nodeName"]
        for name in finished(self.kubectl):
            bound.pop(name, None)
            self.ended.setdefault(name, time.monotonic())
        self._half_placed({name: roles for name, roles in bound.items() if len(roles) == 1})
        self.looks += 1

    def _half_placed(self, now_half: Mapping[str, Mapping[str, str]]) -> None:
        """Note for how long each half is there. On a node that died nobody could have its GPUs: there a job waits."""
        now = time.monotonic()
        found = {name: roles for name, roles in now_half.items() if self.alive.issuperset(roles.values())}
        self._half_since = {name: self._half_since.get(name, now) for name in found}
        for name, roles in found.items():
            half = f"{name}: {roles}"
            self.half_placed_s[half] = max(self.half_placed_s.get(half, 0.0), now - self._half_since[name])


def _overbooked(there: Sequence[Any], others: Sequence[Any]) -> list[str]:
    """The nodes of which pods hold more GPUs than there are."""
    held = Counter[str]()
    for pod in (*there, *others):
        held[pod["spec"]["nodeName"]] += pretended.gpus_of(pod)
    return [f"{node} holds {gpus} of {GPUS} GPUs" for node, gpus in held.items() if gpus > GPUS]


def _holds(pod: Any) -> bool:
    """Whether a pod holds its GPUs: also one that is asked to end."""
    return bool(pod["spec"].get("nodeName")) and pod["status"].get("phase") not in ("Succeeded", "Failed")


def _foreign_pod(name: str, gpus: int) -> Object:
    amounts = {pretended.GPU: str(gpus)}
    container = {"name": "c", "image": "foreign", "resources": {"limits": amounts}}
    spec = {"containers": [container], "nodeSelector": HERE, "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _jobs(names: Sequence[str], chance: random.Random) -> Iterator[Object]:
    for name in names:
        made = job(name, rollout={"servers": chance.randint(1, GPUS - 1)}, learner={"gpus": 1, "backoffLimit": 100})
        if queue := chance.choice(QUEUES):
            made["metadata"]["labels"] = {QUEUE: queue}
        yield made


def test_jobs_survive_day_on_shared_cluster(
    kubectl: Kubectl, nodes: FakeNodes, team: list[str], controller: Controller
) -> None:
    seed = int(os.environ["STAGE2_DAY_SEED"])
    chance = random.Random(f"{seed} jobs")
    ends, alive = fates(JOBS), set(team)
    jobs = list(_jobs(list(ends), chance))
    lengths = {name: chance.uniform(2, 20) for name in ends}
    books = dict.fromkeys((f"{kubectl.namespace}-{index}" for index in range(10_000)), GPUS)
    kubelets = pretended.Kubelets(kubectl, nodes=books, pretended=alive, fates=ends, work_s=0.0, durations=lengths)
    day = Day(kubectl, nodes, list(team), alive, seed)
    kubectl("create", "namespace", day.others.namespace)
    sent: dict[str, float] = {}
    memory: list[int] = []
    try:
        with kubelets:
            for made in jobs:
                kubectl.apply(made)
                sent[made["metadata"]["name"]] = time.monotonic()
                day.beat()
                memory.append(round(controller.memory_mb()))
            _until_all_have_ended(kubectl, day, len(ends), controller, memory)
        day.beat()
    finally:
        kubectl("delete", "namespace", day.others.namespace, "--wait=false")
    slowest_s = max(day.ended[name] - begun for name, begun in sent.items() if name in day.ended)
    written = Counter(re.findall(rf" {kubectl.namespace}/(\S+): (?:apply|create|delete) ", controller.text()))
    seen = DaySeen(
        seed,
        JOBS,
        day.happened,
        over_booked=[*day.double_booked, *kubelets.over_booked],
        half_placed_s=max(day.half_placed_s.values(), default=0.0),
        slowest_s=slowest_s,
        written=written,
        memory=memory,
        sent=len(sent),
    )
    print(f"{dict(day.happened)}; memory MB {memory}; written the most times: {written.most_common(3)}")
    print(seen.row())
    assert set(written) == set(ends)
    assert max(written.values()) < WRITES
    assert finished(kubectl) == {name: OUTCOMES[code] for name, code in ends.items()}
    assert slowest_s < NIGHT_S, "no job starves"
    assert not seen.over_booked
    assert day.looks > JOBS, "what was to be seen was looked at"
    # No half of a job holds its GPUs for longer than an attempt lasts.
    assert {name: s for name, s in day.half_placed_s.items() if s > ATTEMPT_S + SLACK_S} == {}
    assert memory[-1] - memory[len(memory) // 4] < GROWTH_MB
    assert memory[-1] - memory[len(sent) - 1] < REST_GROWTH_MB
    if "STAGE2_DAY_WRITE" in os.environ:
        keep(seen.row())


def _until_all_have_ended(kubectl: Kubectl, day: Day, count: int, controller: Controller, memory: list[int]) -> None:
    start = time.monotonic()
    while (ended := len(finished(kubectl))) < count:
        waited = time.monotonic() - start
        assert waited < NIGHT_S, f"{count - ended} jobs have not ended {waited:.0f} s after the last was sent"
        day.beat()
        memory.append(round(controller.memory_mb()))
        time.sleep(BEAT_S)


RESULTS = Path(__file__).parents[4] / "bench" / "results" / "day.md"
HEAD = """\
# A day in the life of a shared cluster

`STAGE2_DAY_SEED=1 STAGE2_DAY_WRITE=1 pytest -s tests/cluster/controller/kueue/test_day.py`, a row for each seed: jobs
of 2 to 8 GPUs in two queues of Kueue and in none, on four to nine nodes of 8 GPUs, beside pods of others that come and
go. The real API server, controller-manager, scheduler and Kueue, the controller and this test on two cores; kubelets
are played. Booked twice: times at which pods held, or jobs were promised, more GPUs than a node has. Half placed: the
longest time for which one pod of a job had a node that answered and the other had none. From sent to ended: the slowest
job. Written: the requests that wrote children of one job, at most. Memory of the controller in MB, all jobs kept: at a
quarter of the day, as the last job was sent, and at the end.

| seed | jobs | pods of others | nodes that came, were drained, died | booked twice | half placed s | sent to ended s \
| written | memory MB | date |
| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- | --- |
"""


@dataclass(frozen=True)
class DaySeen:
    """What a day has come to."""

    seed: int
    jobs: int
    happened: Counter[str]
    over_booked: Sequence[str]
    half_placed_s: float
    slowest_s: float
    written: Counter[str]
    memory: Sequence[int]
    sent: int  # how many of `memory` are from before the last job was sent

    def row(self) -> str:
        """The line of the table."""
        nodes = ", ".join(str(self.happened[f"node {what}"]) for what in ("appears", "drained", "dies"))
        memory = ", ".join(str(self.memory[index]) for index in (len(self.memory) // 4, self.sent - 1, -1))
        counted = f"{self.seed} | {self.jobs} | {self.happened['foreign pod']} | {nodes} | {len(self.over_booked)}"
        times = f"{self.half_placed_s:.0f} | {self.slowest_s:.0f}"
        return f"| {counted} | {times} | {max(self.written.values())} | {memory} | {datetime.now(UTC).date()} |\n"


def keep(row: str) -> None:
    """Write the row in the place of the one that its seed has."""
    before = RESULTS.read_text("utf-8").splitlines(keepends=True) if RESULTS.exists() else []
    rows = {line.split("|")[1]: line for line in before if re.match(r"\| \d", line)} | {row.split("|")[1]: row}
    RESULTS.write_text(HEAD + "".join(rows[seed] for seed in sorted(rows, key=int)), encoding="utf-8")
