"""A job of a cluster: submitted, watched, suspended, deleted. `stage2.Job` and the commands about jobs are this."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import quote

from stage2_api.errors import refused
from stage2_api.job import GROUP, PLURAL, VERSION, ObjectMeta
from stage2_api.job_status import JobStatus
from stage2_api.log_lines import split_lines
from stage2_api.validation.validate import validate
from stage2_cli.cluster import APPLY, MANAGER, MERGE, Cluster, ClusterUnavailable, JobError, NotFound, connect
from stage2_cli.config_files import read_job
from stage2_controller.job import names

MOST_LOST = 10
"""Requests in a row that `wait` repeats while the cluster is unavailable."""
LOOK_S = 5.0
"""Seconds between two looks for pods and containers whose logs are followed."""
_PAGE = "500"  # objects
_WAITING_LINES = 1000  # of followed logs, in memory
_Start = tuple[str, str, int]  # of a pod's container: their names, and how often it had started before


@dataclass(frozen=True)
class JobEvent:
    """What the controller reported about a job. at: when last, as RFC 3339. count: how often."""

    at: str
    type: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True)
class Job:
    """A job by its name, in the current namespace and context unless others are given.

    user: whom to impersonate. manifest: what `submit` submits.
    All methods raise RequestRefused or ClusterUnavailable, which are JobErrors, where the cluster does not comply.
    """

    name: str
    namespace: str | None = None
    context: str | None = None
    user: str | None = None
    manifest: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ConfigError for a name that would lead to another object, or to all of them."""
        validate(ObjectMeta, {"name": self.name, "namespace": self.namespace}, (), root="metadata")

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        namespace: str | None = None,
        context: str | None = None,
        user: str | None = None,
        changes: Sequence[str] = (),
    ) -> Job:
        """Read and check a job file. Raises ConfigError with every mistake in it. changes: `KEY=VALUE` of --set."""
        manifest, job = read_job(Path(path), changes)
        return cls(job.metadata.name, namespace or job.metadata.namespace, context, user, manifest)

    @classmethod
    def list(
        cls,
        *,
        namespace: str | None = None,
        context: str | None = None,
        user: str | None = None,
        all_namespaces: bool = False,
    ) -> Sequence[tuple[Job, JobStatus]]:
        """Return the jobs of a namespace, or of all, with their status."""
        cluster = connect(namespace, context, user)
        path, pages = _path(None if all_namespaces else cluster.namespace), []
        more = ""
        while True:
            pages.append(cluster.ask("GET", path, query={"limit": _PAGE, **({"continue": more} if more else {})}))
            more = pages[-1]["metadata"].get("continue", "")
            if not more:
                break
        jobs = [item for page in pages for item in page["items"]]
        return [
            (cls(item["metadata"]["name"], item["metadata"]["namespace"], context, user), _status(item))
            for item in jobs
        ]

    def submit(self) -> Job:
        """Create the job, or apply what its file changes; return it, with the name that `generateName` made."""
        if self.manifest is None:
            raise refused("Job", self.name, "has no file to submit", "use Job.from_file")
        metadata = {**self.manifest["metadata"], "namespace": self._cluster.namespace}
        body = {**self.manifest, "metadata": metadata}
        if "name" in metadata:
            owner = {"fieldManager": MANAGER, "force": "true"}  # the file decides, as with kubectl apply
            self._cluster.ask("PATCH", self._path, query=owner, body=body, content=APPLY)
            return self
        created = self._cluster.ask("POST", _path(self._cluster.namespace), query={"fieldManager": MANAGER}, body=body)
        return Job(created["metadata"]["name"], self.namespace, self.context, self.user, self.manifest)

    def read(self) -> dict[str, Any]:
        """Return the whole object of the job."""
        return self._cluster.ask("GET", self._path)

    def status(self) -> JobStatus:
        """Return the job's status; empty until the controller has seen the newest write of the job."""
        return _status(self.read())

    def suspend(self) -> Job:
        """Remove the job's pods; it keeps its checkpoints."""
        return self._merge({"spec": {"suspend": True}})

    def resume(self) -> Job:
        """Run a suspended job again, from its last checkpoint."""
        return self._merge({"spec": {"suspend": False}})

    def delete(self) -> None:
        """Delete the job, and in the background its pods."""
        self._cluster.ask("DELETE", self._path, body={"propagationPolicy": "Background"})

    def events(self) -> Sequence[JobEvent]:
        """Return what the controller reported about the job, oldest first. Clusters forget events after an hour."""
        fields = f"involvedObject.uid={self.read()['metadata']['uid']}"
        where = f"/api/v1/namespaces/{self._cluster.namespace}/events"
        found = self._cluster.ask("GET", where, query={"fieldSelector": fields})["items"]
        events = [
            JobEvent(
                at=item.get("lastTimestamp") or item.get("eventTime") or item["metadata"]["creationTimestamp"],
                type=item.get("type") or "Normal",
                reason=item.get("reason") or "",
                message=item.get("message") or "",
                count=item.get("count") or 1,
            )
            for item in found
        ]
        return sorted(events, key=lambda event: event.at)

    def wait(self, timeout: float | None = None, *, every: float = 5.0) -> Job:
        """Wait until the job has succeeded; the cluster may be unavailable for some requests, `every` seconds apart.

        Raises JobError if the job fails or the cluster refuses to show it, TimeoutError after `timeout` seconds.
        """
        _ = self._cluster  # a cluster that nothing names does not come back
        end = None if timeout is None else time.monotonic() + timeout
        lost = 0
        while True:
            try:
                sentence, lost = self._obstacle(), 0
            except ClusterUnavailable as error:
                sentence, lost = f"{error}", lost + 1
                if lost == MOST_LOST:
                    raise
            if not sentence:
                return self
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(sentence)
            time.sleep(every)

    def _obstacle(self) -> str:
        """Return why the job has not succeeded yet; nothing if it has. Raises JobError if it has failed."""
        status = self.status()
        if status.phase == "Succeeded":
            return ""
        sentence = f"{self.name} is {status.phase or 'not seen yet'}: {status.message or 'is stage2 installed?'}"
        if status.phase == "Failed":
            raise JobError(sentence)
        return sentence

    def logs(self, *, servers: bool = False, follow: bool = False) -> Iterator[str]:
        """Return an iterator over the lines that the job's learner, or its servers, have logged so far.

        follow: also over those to come, of pods that replace others too, until the job has ended or is suspended.
        Lines of servers name their pod and container.
        """
        role = names.ROLE_ROLLOUT if servers else names.ROLE_LEARNER
        found = self._pods(role)
        if not found:
            state = self._obstacle() or f"{self.name} is Succeeded"
            raise JobError(f"{self.name} has no {role} pod whose log could be read; {state}")
        if follow:
            return self._followed(role)
        logs = [self._log(role, pod["metadata"]["name"], one) for pod in found for one in _containers(pod, role)]
        return (line for log in logs for line in log)

    def _pods(self, role: str) -> Sequence[Mapping[str, Any]]:
        selector = f"{names.LABEL_JOB}={names.short_name(self.name)},{names.LABEL_ROLE}={role}"
        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods"
        found: Sequence[Mapping[str, Any]] = self._cluster.ask("GET", path, query={"labelSelector": selector})["items"]
        return found

    def _log(self, role: str, pod: str, container: str, *, follow: bool = False) -> Iterator[str]:
        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{quote(pod, safe='')}/log"
        query = {"container": container, **({"follow": "true"} if follow else {})}
        prefix = f"[pod/{pod}/{container}] " if role == names.ROLE_ROLLOUT else ""
        return _prefixed(prefix, self._cluster.stream(path, query=query))

    def _followed(self, role: str) -> Iterator[str]:
        """Yield the lines of all logs of a role as they come, each read by a thread. Raises the first error of one."""
        lines: Queue[str | JobError | None] = Queue(_WAITING_LINES)
        read: set[_Start] = set()
        ended = 0
        while True:
            over = self._is_over()
            new = [one for pod in self._pods(role) for one in _starts(pod, role) if one not in read]
            for pod, container, _ in new:
                try:
                    log = self._log(role, pod, container, follow=True)
                except NotFound:  # the pod was removed since it was listed
                    ended += 1
                else:
                    threading.Thread(target=_put, args=(log, lines), daemon=True).start()
            read.update(new)
            if over and ended == len(read):
                return
            ended += yield from _until(lines, time.monotonic() + LOOK_S)

    def _is_over(self) -> bool:
        """Return whether no pod of the job starts again; objects of static YAML have no job that would say so."""
        try:
            return self.status().phase in ("Succeeded", "Failed", "Suspended")
        except NotFound:
            return True

    def report(self, html: str | Path | None = None) -> None:
        """Print the job's steps and evaluations as tables, or write them as one page."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / f"{self.name}.log"
            with log.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in self.logs())
            if not log.stat().st_size:
                raise JobError(f"the learner of {self.name} has logged nothing yet; {self._obstacle()}")
            if html is None:
                from stage2_report.tables import report_runs

                report_runs([log])
            else:
                from stage2_report.html_page import PageRequest, write_html

                write_html(PageRequest([log], Path(html)))

    @cached_property
    def _cluster(self) -> Cluster:
        return connect(self.namespace, self.context, self.user)

    @property
    def _path(self) -> str:
        return f"{_path(self._cluster.namespace)}/{quote(self.name, safe='')}"

    def _merge(self, patch: Mapping[str, Any]) -> Job:
        self._cluster.ask("PATCH", self._path, query={"fieldManager": MANAGER}, body=patch, content=MERGE)
        return self


def _path(namespace: str | None) -> str:
    """Return the path of the jobs of a namespace, or of all."""
    return f"/apis/{GROUP}/{VERSION}{f'/namespaces/{namespace}' if namespace else ''}/{PLURAL}"


def _status(job: Mapping[str, Any]) -> JobStatus:
    status = job.get("status") or {}
    seen = status.get("observedGeneration") == job["metadata"]["generation"]
    return JobStatus.model_validate(status if seen else {})


def _prefixed(prefix: str, log: Iterable[bytes]) -> Iterator[str]:
    return (f"{prefix}{line}" for line in split_lines(log))


def _containers(pod: Mapping[str, Any], role: str) -> Sequence[str]:
    """Return the containers of a pod that log what the job does."""
    return [one["name"] for one in pod["spec"]["containers"]] if role == names.ROLE_ROLLOUT else [role]


def _starts(pod: Mapping[str, Any], role: str) -> Iterator[_Start]:
    """Yield the newest start of each container of a pod that has started."""
    for one in pod.get("status", {}).get("containerStatuses", ()):
        if one["name"] in _containers(pod, role) and "waiting" not in one["state"]:
            yield pod["metadata"]["name"], one["name"], one["restartCount"]


def _put(log: Iterator[str], lines: Queue[str | JobError | None]) -> None:
    """Put the lines of a log into a queue, and at last None, or the error that ends it."""
    try:
        for line in log:
            lines.put(line)
        lines.put(None)
    except JobError as error:
        lines.put(error)


def _until(lines: Queue[str | JobError | None], end: float) -> Generator[str, None, int]:
    """Yield the lines of several logs until one of them ends, or until a time; return how many have ended."""
    while (left := end - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except Empty:
            break
        if line is None:
            return 1
        if isinstance(line, JobError):
            raise line
        yield line
    return 0
