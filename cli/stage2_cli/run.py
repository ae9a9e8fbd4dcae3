"""`stage2 run`: the process executor. It runs the containers of a job as processes on this machine, without a cluster.

Like a job's pods, it starts the servers first and the learner when all of them answer. Like the kubelet, it restarts a
server that dies while the learner runs. Like the Job, it restarts the learner after a retryable exit, and never after
exit code 64.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import signal
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

import yaml
from rich.status import Status
from rich.text import Text

from stage2_api.course import to_train_on
from stage2_api.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, counted
from stage2_api.job import RolloutMatchingJob
from stage2_api.log_lines import one_line, without_colours
from stage2_api.pod import layout
from stage2_api.pod.layout import HEALTH_ROUTE, PROGRESS_ROUTE
from stage2_api.pod.report import GRACE_S, LearnerPhase, LearnerReport, read_report
from stage2_api.runconfig import RunConfig
from stage2_api.training import Training
from stage2_cli.config_files import CLUSTER, load_config, load_job, set_fields
from stage2_cli.paths import PathMap, parse_mappings, volume_paths
from stage2_cli.processes import LocalProcess, asks_for_gpus, gpus_hidden, learner_ports, require_gpus, visible_devices
from stage2_cli.requests import RunRequest
from stage2_controller.job import credentials, template_rules
from stage2_controller.job.containers import POD_PORTS, Container, LearnerPorts, Processes, containers
from stage2_report.run_history import parse_record
from stage2_report.terminal import Terminal
from stage2_trainer.checks.examination import require_room
from stage2_trainer.checks.packages import require
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.checks.supported import check_supported
from stage2_trainer.data.files import check_place
from stage2_trainer.data.model_files import is_on_hub, require_folder
from stage2_trainer.model.checkpoints import best_whole, newest_whole
from stage2_trainer.process.activity import ACTIVITY, without_seconds
from stage2_trainer.process.cuda_driver import VISIBLE_VARIABLE, Installation, server_problem, visible_names

_PHASES_OF_A_STEP: tuple[LearnerPhase, ...] = ("syncing", "rollout", "training")
"""Phases that alternate many times a step. They are shown in the status line of a terminal, not in a log."""
_ENDS: tuple[LearnerPhase, ...] = ("done", "failed")
"""Phases whose message is the reason of the end, which the learner's log has."""
TIMEOUT_S = 2.0
THREADS_VARIABLE = "OMP_NUM_THREADS"


@functools.cache
def console() -> Terminal:
    """Return the console on standard output that all of `stage2 run` uses."""
    return Terminal()


class Watcher:
    """Shows the progress of a run, from the learner's /progress and the JSON lines in its log."""

    def __init__(self, log: Path | None = None, progress: Callable[[], bytes | None] = lambda: None) -> None:
        self._log, self._progress = log, progress
        self._offset = log.stat().st_size if log is not None and log.exists() else 0
        self._status = Status("starting", console=console())
        self._last = ""
        if console().is_terminal:
            self._status.start()
        self._block = ExitStack()
        self._doing = self._block.enter_context(ACTIVITY.doing("learner: starting"))
        self._block.enter_context(ACTIVITY.reported(self._put))

    def close(self) -> None:
        """Remove the status line."""
        self._block.close()
        self._status.stop()

    def show(self, text: str) -> None:
        """Show a status at once, and without a terminal again after each 15 seconds in which nothing else is shown."""
        if text == self._last:
            return
        self._last = text
        self._doing.restart(text)
        ACTIVITY.said()
        self._put(text)

    def _put(self, line: str) -> None:
        if console().is_terminal:
            self._status.update(Text(one_line(line or self._last)))
        elif line:
            console().print(line)

    def refresh(self) -> None:
        """Print new records of the learner's log, then show its progress."""
        for record in self._new_records():
            if line := describe(record):
                ACTIVITY.said()
                console().print(line)
        # The learner does not answer before it listens or after it has ended; the exit code covers that.
        body = self._progress()
        progress = None if body is None else read_report(json.loads(body))
        if progress is None:
            self._doing.what = f"{self._last or 'learner: starting'}; it does not report"
        elif text := self._status_text(progress):
            self.show(text)

    def _status_text(self, progress: LearnerReport) -> str | None:
        """Return what a learner reports to be doing; None if only a terminal shows it."""
        does = "" if progress.phase in _ENDS else without_seconds(one_line(progress.message))
        if progress.phase in _PHASES_OF_A_STEP and not does and not console().is_terminal:
            return None
        steps = f", step {progress.step} of {progress.max_steps}" if progress.max_steps else ""
        return f"learner: {progress.phase}{steps}" + (f": {does}" if does else "")

    def failure(self, process: LocalProcess, what: str) -> None:
        """Print what happened to a process and the last lines of its log."""
        what_ended = Text(one_line(f"{process.name} {what}"), "bold red")
        console().print(Text.assemble(what_ended, one_line(f"; the last lines of {process.log}:")))
        console().print(Text(without_colours(process.tail())))

    def _new_records(self) -> list[dict[str, Any]]:
        """Return the records in the lines completed since the last call."""
        if self._log is None or not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for line in complete.splitlines() if (record := parse_record(line))]


def describe(record: dict[str, Any]) -> str | None:
    """Return a readable line about a record; None for records that are only for programs."""
    if record["event"] == "start" and record["step"]:
        return f"resumed after step {record['step']} of {record['max_steps']}"
    if record["event"] == "step":
        return _describe_step(record)
    if record["event"] == "bad_sample":
        return f"sample {record['sample_id']} is set aside: {record['reason']}"
    if record["event"] == "evaluation" and "eval_reward" in record:
        return f"evaluation at step {record['step']}: mean reward {_score(record['eval_reward'])}"
    if record["event"] == "evaluation":
        scores = {"F1 with class": "f1_class_iou50", "F1 of training's matching": "f1_iou50"}
        texts = [
            f"{title} {_score(record[key])}"
            for title, name in scores.items()
            if (key := f"eval_rollout_{name}") in record
        ]
        return f"evaluation at step {record['step']}, IoU 0.5: {', '.join(texts)}"
    return None


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _describe_step(step: dict[str, Any]) -> str:
    if "reward" in step:
        what = f"mean reward {_score(step['reward'])}"
    elif "supervised/objects" in step:
        what = f"{step['supervised/objects']:.0f} objects"
    else:
        found, true = (step.get(f"rollout/{key}", 0) for key in ("matched_maskiou_count", "gt_objects"))
        what = f"matched {found:.0f} of {true:.0f} objects"
    decoded = step.get("rollout/decode_steps_per_token")
    drafts = "" if decoded is None else f", {decoded:.2f} decode steps a token"
    lost = int(step.get("bad_samples_total", 0))
    aside = f"; {counted(lost, 'sample')} set aside so far" if lost else ""
    return f"step {step['step']}: loss {step['loss']:.3f}, {what}{drafts}{aside}"


_POLL_S = 0.5
_LARGEST_CHECKPOINT = 8  # times the weights of the model: those of bfloat16 in float32, and two moments as wide
_MAX_SERVER_RESTARTS = 3
_HOST = "127.0.0.1"
CONFIG, TOKEN, TLS = Path("etc", "config", "config.yaml"), Path("etc", "token", "token"), Path("etc", "tls")


@dataclass(frozen=True)
class LocalRun:
    """A job on this machine: its files and its containers."""

    job: RolloutMatchingJob
    workload: Processes
    work_dir: Path
    paths: PathMap
    engine: str

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """An HTTP client with the run's token and certificate authority."""
        trusted = ssl.create_default_context(cafile=self.work_dir / TLS / "ca.crt")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
        )
        opener.addheaders = [("Authorization", f"Bearer {(self.work_dir / TOKEN).read_text()}")]
        return opener

    def _learner_threads(self) -> int:
        """Return the learner's part of the cores: threads that outnumber them wait for each other in each product."""
        return max(1, len(os.sched_getaffinity(0)) // (1 + len(self.workload.servers)))

    def get(self, url: str) -> bytes | None:
        """Return the body of a response with status 200 from a process of the run; None for any other outcome."""
        try:
            with self._opener.open(url, timeout=TIMEOUT_S) as response:
                body: bytes = response.read()
                return body if response.status == HTTPStatus.OK else None
        except (OSError, HTTPException):
            return None

    def process(self, container: Container, gpus: Sequence[int]) -> LocalProcess:
        """Return a container as a process, which logs to `<work_dir>/logs`."""
        moved = container.relocated(str(self.work_dir / "etc"))
        command = [self.paths.local(word) for word in moved.command]
        if command[:2] == ["stage2", "serve"]:
            command += ["--engine", self.engine]
        # The interpreter and distribution of this command, whatever PATH holds.
        command[0] = shutil.which(command[0], path=str(Path(sys.executable).parent)) or command[0]
        env = {**os.environ, **moved.env, "HOME": os.environ.get("HOME", "/tmp"), "PYTHONUNBUFFERED": "1"}
        if gpus:
            env[VISIBLE_VARIABLE] = visible_devices(gpus)
        if container == self.workload.learner and visible_names(env) == []:
            env = {THREADS_VARIABLE: str(self._learner_threads()), **env}
        return LocalProcess(container.name, command, env, self.work_dir / "logs" / f"{container.name}.log")


def run_job(request: RunRequest) -> int:
    """Run a job file to its end on this machine; return the learner's exit code.

    Raises ConfigError if the job is invalid, or one of its volumes or GPUs is not on this machine.
    """
    job, mappings = load_job(request.file, request.changes or ()), parse_mappings(request.mapped or ())
    require("trainer")
    check_place("--work-dir", request.work_dir / CONFIG)
    if ignored := set_fields(job, CLUSTER):
        console().print(f"not applied to processes on this machine: {', '.join(ignored)}", style="yellow")
    signal.signal(signal.SIGTERM, _interrupt)
    with gpus_hidden(request.cpu or not asks_for_gpus(job)), learner_ports(job.spec.rollout.servers) as ports:
        local = prepare(job, mappings, request.work_dir.resolve(), request.engine, ports)
        _check(local)
        try:
            code = _run(local, overwrite=request.overwrite)
        except KeyboardInterrupt:
            console().print(_how_to_resume(_training(local)))
            raise
        if code == os.EX_OK:
            console().print(_what_is_next(_training(local)))
        return code


def _training(local: LocalRun) -> Training:
    return load_config(local.work_dir / CONFIG).training


def _how_to_resume(training: Training) -> str:
    """Return what was saved of a run that was interrupted, and the command that resumes it."""
    saved = newest_whole(Path(training.output_dir))
    command = shlex.join(["stage2", *(word for word in sys.argv[1:] if word != "--overwrite")])
    return f"saved: {saved or 'nothing, so the run starts from its first step'}; to resume: {command}"


def _what_is_next(training: Training) -> str:
    """Return what may follow a run that has ended."""
    best = best_whole(Path(training.output_dir))
    if best is None:
        return f"the run has ended, and saved no checkpoint in {training.output_dir}"
    export = shlex.join(["stage2", "export", training.output_dir, "--output", "DIR"])
    more = to_train_on(training)
    return f"the run has ended; best checkpoint: {best}. To export it: {export}. To train for longer: {more}"


def _run(local: LocalRun, *, overwrite: bool = False) -> int:
    what = counted(len(local.workload.servers), "rollout server")
    console().print(Text.assemble((local.job.metadata.name, "bold"), f": {what}, one learner"))
    console().print(f"logs: {local.work_dir / 'logs'}")
    with ExitStack() as cleanup:
        try:
            servers = _start_servers(local, cleanup)
            return _wait_until_ready(servers, local) or _train(local, servers, cleanup, overwrite=overwrite)
        except KeyboardInterrupt:
            console().print("stopping: the learner saves its last whole step; Ctrl-C again ends it at once")
            raise


def prepare(
    job: RolloutMatchingJob,
    mapped: Mapping[str, Path],
    work_dir: Path,
    engine: str,
    ports: LearnerPorts = POD_PORTS,
) -> LocalRun:
    """Write configuration, token and certificates, and find a local folder for every volume; start nothing."""
    paths = PathMap({**volume_paths(job, work_dir / "volumes", mapped), **mapped})
    template_rules.check(job)
    workload = containers(job, host_for=lambda _: _HOST, learner_ports=ports, tls=True)
    gpus = sum(container.gpus for container in (*workload.servers, workload.learner))
    if asks_for_gpus(job):
        require_gpus(gpus, found=gpus if engine == "stub" else None)  # a stub is for trials, on whatever is there
    if asks_for_gpus(job) and visible_names(os.environ) == []:
        console().print(f"on the CPU: none of the {gpus} GPUs of the job are used", style="yellow")
    config = paths.localise(yaml.safe_load(workload.config_text))
    _write(work_dir / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True), mode=0o644)
    secrets = credentials.new({"local": (_HOST,)}, datetime.now(UTC))
    _write(work_dir / TOKEN, secrets[layout.TOKEN_KEY], mode=0o600)
    certificates = {
        "ca.crt": layout.CA_KEY,
        "tls.crt": layout.certificate_key("local"),
        "tls.key": layout.private_key_key("local"),
    }
    for name, key in certificates.items():
        _write(work_dir / TLS / name, secrets[key], mode=0o600)
    shutil.rmtree(work_dir / "logs", ignore_errors=True)
    return LocalRun(job=job, workload=workload, work_dir=work_dir, paths=paths, engine=engine)


def _check(local: LocalRun) -> None:
    """Raise ConfigError for mistakes that the learner would find only after the servers have started."""
    config = load_config(local.work_dir / CONFIG)
    processes = max(1, local.workload.learner.gpus)
    check_supported(config, world_size=processes)
    if local.workload.servers and local.engine == "vllm":
        _check_servers()
    checked_records(config, world_size=processes)
    if not is_on_hub(config.model.model):
        require_folder(config, Path(config.model.model))
    if not _has_ample_room(config):
        require_room(config)


def _has_ample_room(config: RunConfig) -> bool:
    """Whether the disk of the output folder surely holds a checkpoint: no state of training is larger than this."""
    folder = Path(config.training.output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    weights = sum(file.stat().st_size for file in Path(config.model.model).glob("*.safetensors"))
    return shutil.disk_usage(existing).free > _LARGEST_CHECKPOINT * weights > 0


def _check_servers() -> None:
    from stage2_trainer.serve.launch import installed_platform

    if installed_platform() == "cuda" and (problem := server_problem(Installation.detect(os.environ))):
        raise ConfigError([problem])


def _write(path: Path, text: str, *, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)


def _start_servers(local: LocalRun, cleanup: ExitStack) -> list[LocalProcess]:
    servers = []
    next_gpu = 0
    for container in local.workload.servers:
        server = local.process(container, range(next_gpu, next_gpu + container.gpus))
        next_gpu += container.gpus
        cleanup.callback(server.stop)
        server.start()
        servers.append(server)
    return servers


def _wait_until_ready(servers: Sequence[LocalProcess], local: LocalRun) -> int:
    """Return 0 once every server has answered on /health; another exit code if one dies or misses the deadline."""
    urls = [server.base_url for server in local.workload.addresses]
    started, patience = time.monotonic(), local.job.spec.learner.start_deadline_seconds
    with closing(Watcher()) as watcher:
        waiting = dict(zip(urls, servers, strict=True))
        while waiting:
            for url, server in list(waiting.items()):
                if server.exit_code is not None:
                    watcher.failure(server, f"ended with exit code {server.exit_code} before it was ready")
                    return EXIT_CONFIG if server.exit_code == EXIT_CONFIG else EXIT_FAILURE
                if time.monotonic() - started > patience:
                    watcher.failure(server, f"did not answer within spec.learner.startDeadlineSeconds ({patience} s)")
                    return EXIT_FAILURE
                if local.get(f"{url}{HEALTH_ROUTE}") is not None:
                    del waiting[url]
                    console().print(f"{server.name} is ready on {url} after {time.monotonic() - started:.0f} s")
            watcher.show(f"starting servers: {len(servers) - len(waiting)} of {len(servers)} ready")
            time.sleep(_POLL_S)
    return 0


def _train(local: LocalRun, servers: Sequence[LocalProcess], cleanup: ExitStack, *, overwrite: bool) -> int:
    """Run the learner; restart it after each retryable exit until the backoff limit is reached."""
    first_gpu = sum(container.gpus for container in local.workload.servers)
    gpus = range(first_gpu, first_gpu + local.workload.learner.gpus)
    for attempt in range(local.job.spec.learner.backoff_limit + 1):
        learner = local.process(local.workload.learner, gpus)
        if overwrite and attempt == 0:
            learner.command = [*learner.command, "--overwrite"]
        cleanup.callback(learner.stop, grace_s=GRACE_S)
        learner.start()
        code = _watch(local, learner, servers)
        if code in (0, EXIT_CONFIG):
            break
        if attempt < local.job.spec.learner.backoff_limit:
            console().print(f"learner: exit code {code}; restarting it ({attempt + 1})")
    return code


def _watch(local: LocalRun, learner: LocalProcess, servers: Sequence[LocalProcess]) -> int:
    progress_url = f"https://{_HOST}:{local.workload.learner.ports['progress']}{PROGRESS_ROUTE}"
    restarts = {server.name: 0 for server in servers}
    with closing(Watcher(learner.log, lambda: local.get(progress_url))) as watcher:
        while (code := learner.exit_code) is None:
            watcher.refresh()
            for server in servers:
                if server.exit_code == EXIT_CONFIG:
                    watcher.failure(server, f"ended with exit code {EXIT_CONFIG}: its configuration is wrong")
                    return EXIT_CONFIG
                if server.exit_code is not None and restarts[server.name] <= _MAX_SERVER_RESTARTS:
                    _restart(watcher, server, restarts)
            time.sleep(_POLL_S)
        watcher.refresh()
        if code != 0:
            watcher.failure(learner, f"ended with exit code {code}")
            _show_blamed(watcher, learner, local, servers)
    return code


def _restart(watcher: Watcher, server: LocalProcess, restarts: dict[str, int]) -> None:
    """Restart a server that died, or print that it has used up its restarts."""
    restarts[server.name] += 1
    again = restarts[server.name] <= _MAX_SERVER_RESTARTS
    then = "restarting it" if again else f"not restarting it after {_MAX_SERVER_RESTARTS} restarts"
    watcher.failure(server, f"ended with exit code {server.exit_code}; {then}")
    if again:
        server.start()


def _show_blamed(watcher: Watcher, learner: LocalProcess, local: LocalRun, servers: Sequence[LocalProcess]) -> None:
    """Show the last log lines of each server that an error at the end of the learner's log mentions."""
    errors = [line for line in learner.tail().splitlines() if " ERROR " in line]
    for address, server in zip(local.workload.addresses, servers, strict=True):
        if any(f"server {address.base_url}" in line for line in errors):
            watcher.failure(server, "is mentioned there")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
