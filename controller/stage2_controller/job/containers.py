"""The servers and the learner of a job as any executor starts them: commands, environment, ports, configuration.

`stage2 run` starts them as processes; `stage2 render` and the controller put them into pods. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import yaml

from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import layout
from stage2_api.pod.layout import (
    GROUP_PORT,
    METRICS_PORT,
    METRICS_PORT_VARIABLE,
    PROGRESS_PORT,
    PROGRESS_PORT_VARIABLE,
    TERMINATION_LOG_VARIABLE,
    TLS_CA_FILE_VARIABLE,
    TLS_CERT_FILE_VARIABLE,
    TLS_KEY_FILE_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import ServerAddress
from stage2_controller.job import names

_GROUP = "group-"
_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an indexed Job
_COMMON_ENV = {TOKEN_FILE_VARIABLE: layout.TOKEN_PATH, "HOME": layout.TMP_FOLDER}
_TLS_ENV = {
    TLS_CA_FILE_VARIABLE: layout.CA_PATH,
    TLS_CERT_FILE_VARIABLE: layout.CERT_PATH,
    TLS_KEY_FILE_VARIABLE: layout.KEY_PATH,
}


@dataclass(frozen=True)
class LearnerPorts:
    """The learner's ports; server i joins its transfer group at `group` + i."""

    progress: int = PROGRESS_PORT
    metrics: int = METRICS_PORT
    group: int = GROUP_PORT


POD_PORTS = LearnerPorts()


@dataclass(frozen=True)
class Container:
    """One process of a job: a rollout server or the learner."""

    name: str  # server-0, server-1, …, learner
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]  # by name, at most 15 characters each (IANA service names)
    gpus: int

    @property
    def port(self) -> int:
        """The first port, which serves HTTP."""
        return next(iter(self.ports.values()))

    @property
    def group_ports(self) -> tuple[int, ...]:
        """The learner's ports to which servers connect for weights."""
        return tuple(port for name, port in self.ports.items() if name.startswith(_GROUP))

    def relocated(self, root: str) -> "Container":
        """Return the same container with its files, and its termination log, under the folder `root`."""

        def relocate(text: str) -> str:
            return text.replace(layout.ROOT, root).replace(layout.TERMINATION_LOG, f"{root}/termination-log")

        env = {key: relocate(value) for key, value in self.env.items()}
        return replace(self, command=tuple(map(relocate, self.command)), env=env)


@dataclass(frozen=True)
class Processes:
    """All processes of a job, and the configuration file that they read."""

    servers: tuple[Container, ...]
    learner: Container
    addresses: tuple[ServerAddress, ...]  # of the servers, in their order
    config_text: str  # the YAML at files.CONFIG_PATH
    per_pod: int  # servers of one pod: pods have the same ones, and divide `servers` in their order

    @property
    def of_pod(self) -> tuple[Container, ...]:
        """The servers of each pod."""
        return self.servers[: self.per_pod]


def containers(
    job: RolloutMatchingJob,
    host_for: Callable[[int], str],
    learner_ports: LearnerPorts = POD_PORTS,
    *,
    tls: bool,
    meeting: str | None = None,
) -> Processes:
    """Return the processes of a job.

    host_for: returns the host of server i. tls: whether the servers serve HTTPS. meeting: the host of the learner's
    first pod, where servers and learner run in several pods; None: all processes share one machine.
    """
    scheme, env = ("https", {**_COMMON_ENV, **_TLS_ENV}) if tls else ("http", _COMMON_ENV)
    rollout = job.spec.rollout
    per_pod = rollout.servers_per_pod if meeting else rollout.servers
    servers = tuple(_server(job, index, index % per_pod, env, apart=bool(meeting)) for index in range(rollout.servers))
    addresses = tuple(
        ServerAddress(f"{scheme}://{host_for(index)}:{server.port}", learner_ports.group + index)
        for index, server in enumerate(servers)
    )
    return Processes(
        servers=servers,
        learner=_learner(job, learner_ports, env, meeting),
        addresses=addresses,
        config_text=_config_text(job.spec.config, addresses),
        per_pod=per_pod,
    )


def is_elastic(job: RolloutMatchingJob) -> bool:
    """Return whether the number of the job's servers may change while it runs: one Job has all of their pods.

    Where each pod gets a domain to itself, it needs a Job of its own, and the number of JobSet's Jobs is fixed.
    """
    return job.spec.engine == names.JOBSET and job.spec.placement.topology != "Exclusive"


def _config_text(config: RunConfig, addresses: Sequence[ServerAddress]) -> str:
    """Return the training YAML as its author wrote it, with the addresses of the servers, which no author sets."""
    document = config.model_dump(mode="json", exclude_unset=True)
    if addresses:
        section = document
        for key in ("custom", "extra", "rollout_matching", "vllm", "server"):
            section = section.setdefault(key, {})
        section["servers"] = [asdict(address) for address in addresses]
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def wait_container(learner: Container) -> Container:
    """Return the container that waits for the servers in the learner's pod, before the learner starts."""
    return replace(
        learner,
        name=names.WAIT_CONTAINER,
        command=("stage2", "wait", layout.CONFIG_PATH),
        env={key: value for key, value in learner.env.items() if key in {**_COMMON_ENV, **_TLS_ENV}},
        ports={},
        gpus=0,
    )


def _server(job: RolloutMatchingJob, index: int, in_pod: int, env: Mapping[str, str], *, apart: bool) -> Container:
    """Return server `index`. apart: its command counts it among those of its pod, and is the same in every pod."""
    of_pod = (f"--pod=$({layout.POD_INDEX_VARIABLE})",) if apart else ()
    return Container(
        name=f"server-{index}",
        command=("stage2", "serve", layout.CONFIG_PATH, "--server", str(in_pod), *of_pod),
        env=env,
        ports={f"http-{in_pod}": job.spec.rollout.port + in_pod},
        gpus=job.spec.rollout.gpus_per_server,
    )


def _learner(job: RolloutMatchingJob, ports: LearnerPorts, env: Mapping[str, str], meeting: str | None) -> Container:
    spec = job.spec.learner
    here = 1 if meeting else spec.nodes  # on one machine the learner has the processes of all its pods
    processes = max(spec.gpus, 1) * here
    words = (f"--processes={processes}",) if processes > 1 else ()
    if meeting and spec.nodes > 1:
        words = (*words, f"--node=$({_COMPLETION_INDEX})/{spec.nodes}@{meeting}:{layout.RENDEZVOUS_PORT}")
    return Container(
        name=names.ROLE_LEARNER,
        command=("stage2", "learn", layout.CONFIG_PATH, *words),
        env={
            **env,
            PROGRESS_PORT_VARIABLE: str(ports.progress),
            METRICS_PORT_VARIABLE: str(ports.metrics),
            TERMINATION_LOG_VARIABLE: layout.TERMINATION_LOG,
        },
        ports={
            "progress": ports.progress,
            "metrics": ports.metrics,
            **{f"{_GROUP}{index}": ports.group + index for index in range(job.spec.rollout.servers)},
        },
        gpus=spec.gpus * here,
    )
