"""The construction of rollouts from servers: the way of weights, the way of requests, and the checks before either."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack

from stage2_api.runconfig import RunConfig
from stage2_trainer.process.policy import Policy
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.identity_check import check_identity, check_swift_identity
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.rollout_source import RolloutSource
from stage2_trainer.rollouts.swift import SwiftBackend
from stage2_trainer.rollouts.synced_rollouts import SyncedRollouts
from stage2_trainer.sync.fleet.adapter_sync import AdapterSync, obstacle
from stage2_trainer.sync.fleet.full_sync import FullSync
from stage2_trainer.sync.fleet.proved_step import ProvedStep
from stage2_trainer.sync.fleet.synchronizer import WeightSynchronizer, resolve_mode
from stage2_trainer.sync.fleet.verify import Prover, server_logprobs, swift_logprobs
from stage2_trainer.sync.swift.swift_sync import SwiftSync
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.rollout import Sampling, ServedBackend
from stage2_trainer.wire.server_health import wait_until_healthy

SWIFT_OBSTACLE = "servers of `swift rollout` are sent full weights only (vllm.server.protocol)"


def server_rollouts(config: RunConfig, policy: Policy, context: RunContext, stack: ExitStack) -> SyncedRollouts:
    """Wait for the servers, check that they read prompts as the learner does, and return what generates with them.

    `stack` closes the connections.

    Raises:
        ConfigError: a sync mode that cannot work, servers that cannot merge and must, or that read prompts differently.
        ServerError: a server did not come.
    """
    server, token, reporter = config.rollout_matching.vllm.server, context.token, context.reporter
    clients = _clients(config, token, stack)
    full = _full_sync(config, policy, token, stack)
    synchronizer = _synchronizer(config, policy, clients, full, context.proved)
    backend = _backend(config, clients, token, stack)
    urls = [client.base_url for client in clients]
    wait = functools.partial(wait_until_healthy, urls, token, timeout_s=server.timeout_s, protocol=server.protocol)
    reporter.update(phase="waiting-for-servers")
    wait()
    probe, ids = policy.probe, policy.probe.inputs["input_ids"][0].tolist()
    if server.protocol == "swift":
        check_swift_identity(clients, probe.messages, ids)
    else:
        check_identity(clients, policy.encoder.processor, probe.messages, ids)
    if isinstance(full, FullSync) and synchronizer.effective == "full":
        full.choose_place(policy.model)
    return SyncedRollouts(backend, synchronizer, seed=config.training.seed, wait=wait, reporter=reporter)


def training_rollouts(config: RunConfig, synced: SyncedRollouts, stack: ExitStack) -> RolloutSource | PipelinedRollouts:
    """Return where training has its rollouts from: as fresh as can be, or one step ahead (`pipeline.enabled`)."""
    if not config.rollout_matching.pipeline.enabled:
        return synced
    ahead = PipelinedRollouts(synced)
    stack.callback(ahead.close)
    return ahead


def _clients(config: RunConfig, token: str, stack: ExitStack) -> list[ServerClient]:
    server = config.rollout_matching.vllm.server
    clients = [
        ServerClient(address.base_url, token, timeout_s=server.timeout_s) for address in server.resolved_servers()
    ]
    for client in clients:
        stack.callback(client.close)
    return clients


def _backend(config: RunConfig, clients: Sequence[ServerClient], token: str, stack: ExitStack) -> ServedBackend:
    matching = config.rollout_matching
    server = matching.vllm.server
    sampling = Sampling.from_config(matching)
    limit = server.infer_timeout_s if server.infer_timeout_s and server.infer_timeout_s > 0 else None
    if server.protocol == "swift":
        return SwiftBackend(clients, sampling=sampling, infer_timeout_s=limit)
    backend = ServerBackend(
        [client.base_url for client in clients],
        token=token,
        sampling=sampling,
        timeout_s=server.timeout_s,
        infer_timeout_s=limit,
        in_flight=matching.vllm.max_num_seqs * config.data_parallel_size,
    )
    stack.callback(backend.close)
    return backend


def _full_sync(config: RunConfig, policy: Policy, token: str, stack: ExitStack) -> FullSync | SwiftSync:
    vllm = config.rollout_matching.vllm
    servers, timeout_s = vllm.server.resolved_servers(), vllm.server.timeout_s
    full: FullSync | SwiftSync
    if vllm.server.protocol == "swift":
        full = SwiftSync(servers, token=token, timeout_s=timeout_s, device=policy.device, rounding=vllm.sync.rounding)
    else:
        full = FullSync(
            servers,
            token=token,
            timeout_s=timeout_s,
            device=policy.device,
            how=vllm.sync,
            adapted=config.tuner.train_type == "lora",
        )
    stack.callback(full.close)
    return full


def _synchronizer(
    config: RunConfig,
    policy: Policy,
    clients: Sequence[ServerClient],
    full: FullSync | SwiftSync,
    proved: ProvedStep,
) -> WeightSynchronizer:
    """Return how weights reach the servers; ConfigError when what trains cannot be sent as it is asked for."""
    vllm = config.rollout_matching.vllm
    swift = isinstance(full, SwiftSync)
    reason = SWIFT_OBSTACLE if swift else obstacle(policy.model)
    mode = resolve_mode(vllm.sync.mode, enable_lora=vllm.enable_lora, obstacle=reason)
    prover = Prover(
        policy.probe,
        clients,
        every=vllm.sync.verify_every,
        tolerance=vllm.sync.verify_tolerance,
        ask=swift_logprobs if swift else server_logprobs,
        proved=proved,
    )
    return WeightSynchronizer(
        vllm.sync.mode,
        full=full,
        adapter=AdapterSync(full.fleet) if isinstance(full, FullSync) and mode == "adapter" else None,
        fallback=vllm.sync.fallback_to_full,
        prover=prover,
    )
