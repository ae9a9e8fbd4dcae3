"""The servers and the learner of a job, as any executor starts them: commands, environment, ports, files.

`stage2 run` starts them as processes, `stage2 render` and the controller put them into pods. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import yaml
from stage2_api.job import RolloutMatchingJob

from stage2_api.runconfig import RunConfig
from stage2_controller import effective, names

_COMMON_ENV = {"STAGE2_TOKEN_FILE": names.TOKEN_PATH, "HF_HUB_OFFLINE": "1", "HOME": "/tmp"}


@dataclass(frozen=True)
class Container:
    """One process of a job: a rollout server or the learner."""

    name: str  # server-0, server-1, …, learner
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]  # by name, at most 15 characters each (IANA service names)
    gpus: int

    def relocated(self, root: str) -> "Container":
        """The same container where `/etc/stage2` is the folder `root` and the termination log lies in it."""

        def moved(text: str) -> str:
            return text.replace(names.MOUNT_ROOT, root).replace(names.TERMINATION_LOG, f"{root}/termination-log")

        return replace(
            self,
            command=tuple(moved(word) for word in self.command),
            env={key: moved(value) for key, value in self.env.items()},
        )


@dataclass(frozen=True)
class Workload:
    """All processes of a job and the one file that they read besides the token."""

    servers: tuple[Container, ...]
    learner: Container
    config: RunConfig
    config_text: str  # the YAML at names.CONFIG_PATH


def containers(job: RolloutMatchingJob, host_for: Callable[[int], str]) -> Workload:
    """The workload of `job`; `host_for(i)` is the host on which server i is reached.

    Raises ConfigError if the configuration breaks a rule once the servers' addresses are filled in.
    """
    addresses = [
        (f"http://{host_for(index)}:{job.spec.rollout.port + index}", names.GROUP_PORT + index)
        for index in range(job.spec.rollout.servers if effective.has_servers(job) else 0)
    ]
    raw, config = effective.run_config(job, addresses)
    return Workload(
        servers=tuple(_server(job, index) for index in range(len(addresses))),
        learner=_learner(job, [group_port for _, group_port in addresses]),
        config=config,
        config_text=yaml.safe_dump(raw, sort_keys=False, allow_unicode=True),
    )


def _server(job: RolloutMatchingJob, index: int) -> Container:
    return Container(
        name=f"server-{index}",
        command=("stage2", "serve", names.CONFIG_PATH, "--server", str(index)),
        env=_COMMON_ENV,
        ports={"http": job.spec.rollout.port + index},
        gpus=job.spec.rollout.gpus_per_server,
    )


def _learner(job: RolloutMatchingJob, group_ports: Sequence[int]) -> Container:
    return Container(
        name=names.ROLE_LEARNER,
        command=(*_launcher(job), "learn", names.CONFIG_PATH),
        env={
            **_COMMON_ENV,
            "STAGE2_PROGRESS_PORT": str(names.PROGRESS_PORT),
            "STAGE2_TERMINATION_LOG": names.TERMINATION_LOG,
        },
        ports={
            "progress": names.PROGRESS_PORT,
            **{f"group-{index}": port for index, port in enumerate(group_ports)},
        },
        gpus=job.spec.learner.gpus,
    )


def _launcher(job: RolloutMatchingJob) -> tuple[str, ...]:
    """`stage2`, or torchrun around it where the learner is one process for each of several GPUs."""
    if effective.has_servers(job) or job.spec.learner.gpus <= 1:
        return ("stage2",)
    return ("torchrun", "--standalone", f"--nproc-per-node={job.spec.learner.gpus}", "--no-python", "stage2")
