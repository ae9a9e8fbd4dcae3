"""From a configuration to a source of rollouts: servers, once they are up and checked, or this process itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any

import torch

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import ServerAddress
from stage2_trainer.data.encode import PromptCache
from stage2_trainer.model.deepspeed_config import shards_weights
from stage2_trainer.model.gathered_weights import GatheredWeights
from stage2_trainer.model.offload import DeviceMover, StateOffloader
from stage2_trainer.model.policy import Policy
from stage2_trainer.process.background import all_at_once
from stage2_trainer.process.ranks import world_size
from stage2_trainer.rollouts.colocate import ColocateEngine, EngineProver
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.in_process import ColocateRollouts, HfRollouts
from stage2_trainer.rollouts.members import Members
from stage2_trainer.rollouts.rollout_source import ServerRollouts
from stage2_trainer.rollouts.swift import SwiftBackend
from stage2_trainer.serve.server_command import ON_CPU, PRECOMPILED, UNCOMPILED
from stage2_trainer.sync.fleet.adapter import adapter_obstacle, push_adapter, resolve_mode
from stage2_trainer.sync.fleet.proof import Ask, Prover, server_logprobs, swift_logprobs
from stage2_trainer.sync.fleet.push import FullPush, Push, WeightSync
from stage2_trainer.sync.fleet.report import ProvedStep, SyncReport
from stage2_trainer.sync.fleet.server import close_update
from stage2_trainer.sync.swift.swift_sync import SwiftPush
from stage2_trainer.sync.tensors.merge import HERE, WeightAccess
from stage2_trainer.sync.vllm.vllm_compat import dummy_load_options, usable_drafts, without_removed_options
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body, infer, request_config
from stage2_trainer.wire.client import ServerClient, wait_until_healthy
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.identity import ENGINE, IDENTITY_ROUTE, describe, first_difference
from stage2_trainer.wire.requests import RolloutRequest, Sampling

logger = logging.getLogger(__name__)
PHASE = "identity"
WAY_OUT = (
    "give server and learner the same model directory and template.min_pixels and max_pixels, and restart the server"
)
SWIFT_OBSTACLE = "servers of `swift rollout` are sent full weights only (vllm.server.protocol)"


def server_rollouts(
    config: RunConfig, policy: Policy, context: RunContext, stack: ExitStack, access: WeightAccess = HERE
) -> ServerRollouts:
    """Wait for the servers, check that they read prompts as the learner does, and return what generates with them.

    `stack` closes the connections. access: how the learner's weights are read.

    Raises:
        ConfigError: a sync mode that cannot work, servers that must merge and cannot, or that read prompts differently.
        ServerError: a server did not come up.
    """
    server, token, reporter = config.rollout_matching.vllm.server, context.token, context.reporter
    reporter.update(phase="waiting-for-servers")
    if server.protocol == "swift":
        return _swift_rollouts(config, policy, context, stack, access)
    listed, timeout_s = context.servers or server.resolved_servers, server.timeout_s
    full = FullPush(
        listed(),
        token=token,
        timeout_s=timeout_s,
        device=policy.device,
        how=config.rollout_matching.vllm.sync,
        adapted=config.tuner.train_type == "lora",
        access=access,
    )
    stack.callback(full.close)
    sync, enable_lora = config.rollout_matching.vllm.sync, config.rollout_matching.vllm.enable_lora
    mode = resolve_mode(sync.mode, enable_lora=enable_lora, obstacle=adapter_obstacle(policy.model))
    adapter = partial(push_adapter, full.fleet, access=access) if mode == "adapter" else None

    def clients_of(servers: Sequence[ServerAddress]) -> list[ServerClient]:
        return [ServerClient(one.base_url, token, timeout_s=timeout_s) for one in servers]

    def answering(servers: Sequence[ServerAddress], some_after_s: float = 0.0) -> list[ServerAddress]:
        urls = [one.base_url for one in servers]
        found = wait_until_healthy(urls, token, timeout_s=timeout_s, some_after_s=some_after_s)
        return [one for one in servers if one.base_url in found]

    def greet(*servers: ServerAddress) -> None:
        ids = policy.probe.inputs["input_ids"][0].tolist()
        check_identity(clients_of(servers), policy.encoder.processor, policy.probe.messages, ids)

    def set_servers(servers: Sequence[ServerAddress]) -> None:
        full.fleet.set_servers(servers)
        backend.set_servers([one.base_url for one in servers])
        prover.clients = clients_of(servers)

    present = answering(listed(), timeout_s)
    prover = _prover(config, policy, clients_of(present), context.proved, server_logprobs, access)
    backend = _backend(config, present, token, stack)
    full.fleet.set_servers(present)
    greet(*present)
    if adapter is None:
        full.choose_location(policy.model)
    members = Members(present, listed=listed, greet=greet, wait=answering, on_change=set_servers)
    rollouts = ServerRollouts(
        backend,
        _weight_sync(config, full, adapter, prover),
        seed=config.training.seed,
        wait=lambda error: members.follow(error.servers | backend.lost),
        follow=lambda: members.follow(backend.lost),
        reporter=reporter,
    )
    rollouts.engines = [str(_identity(client).get(ENGINE, "")) for client in prover.clients]
    logger.info("the servers compute with %s", "; ".join(sorted(set(rollouts.engines))))
    return rollouts


def _swift_rollouts(
    config: RunConfig, policy: Policy, context: RunContext, stack: ExitStack, access: WeightAccess
) -> ServerRollouts:
    """Return the rollouts of `swift rollout` servers, which all take part from the beginning to the end."""
    vllm, token = config.rollout_matching.vllm, context.token
    server, timeout_s = vllm.server, vllm.server.timeout_s
    servers = server.resolved_servers()
    clients = [ServerClient(one.base_url, token, timeout_s=timeout_s) for one in servers]
    options: dict[str, Any] = {"token": token, "timeout_s": timeout_s, "device": policy.device, "access": access}
    full = SwiftPush(servers, rounding=vllm.sync.rounding, **options)
    stack.callback(full.close)
    resolve_mode(vllm.sync.mode, enable_lora=vllm.enable_lora, obstacle=SWIFT_OBSTACLE)

    def wait(_: ServerError | None = None) -> None:
        wait_until_healthy([one.base_url for one in servers], token, timeout_s=timeout_s, protocol="swift")

    wait()
    check_swift_identity(clients, policy.probe.messages, policy.probe.inputs["input_ids"][0].tolist())
    sampling = Sampling.from_config(config.rollout_matching)
    backend = SwiftBackend(clients, sampling=sampling, infer_timeout_s=_request_limit(config))
    prover = _prover(config, policy, clients, context.proved, swift_logprobs, access)
    synchronizer = _weight_sync(config, full, None, prover)
    return ServerRollouts(backend, synchronizer, seed=config.training.seed, wait=wait, reporter=context.reporter)


def _request_limit(config: RunConfig) -> float | None:
    limit = config.rollout_matching.vllm.server.infer_timeout_s
    return limit if limit and limit > 0 else None


def _backend(config: RunConfig, servers: Sequence[ServerAddress], token: str, stack: ExitStack) -> ServerBackend:
    matching = config.rollout_matching
    backend = ServerBackend(
        [one.base_url for one in servers],
        token=token,
        sampling=Sampling.from_config(matching),
        timeout_s=matching.vllm.server.timeout_s,
        infer_timeout_s=_request_limit(config),
        in_flight=matching.vllm.max_num_seqs * config.data_parallel_size,
    )
    stack.callback(backend.close)
    return backend


def _prover(
    config: RunConfig,
    policy: Policy,
    clients: Sequence[ServerClient],
    proved: ProvedStep,
    ask: Ask,
    access: WeightAccess,
) -> Prover:
    vllm = config.rollout_matching.vllm
    every, tolerance = vllm.sync.verify_every, vllm.proof_tolerance
    return Prover(policy.probe, clients, every=every, tolerance=tolerance, ask=ask, proved=proved, access=access)


def _weight_sync(config: RunConfig, full: FullPush | SwiftPush, adapter: Push | None, prover: Prover) -> WeightSync:
    """Return the sync of weights to the servers, which are up."""
    sync = config.rollout_matching.vllm.sync
    return WeightSync(
        sync.mode,
        full=full.push,
        adapter=adapter,
        fallback=sync.fallback_to_full,
        prover=prover,
        planned=full.planned() if adapter is None else SyncReport(transport=full.planned().transport),
    )


def check_identity(
    clients: Sequence[ServerClient], processor: Any, messages: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]
) -> None:
    """Compare every server's tokenizer, chat template, image limits, and ids of one prompt with the learner's.

    prompt_ids: the learner's ids of `messages`, image placeholders expanded.

    Raises:
        ConfigError: with every difference on every server.
        ServerError: a server does not answer.
    """
    own = describe(processor)
    found = all_at_once(lambda client: _differences(client, own, messages, list(prompt_ids)), clients)
    if problems := list(chain(*found)):
        raise ConfigError(problems)
    logger.info("%d servers tokenize a sample prompt to the same %d ids as the learner", len(clients), len(prompt_ids))


def _differences(
    client: ServerClient, own: Mapping[str, object], messages: Sequence[Mapping[str, Any]], prompt_ids: list[int]
) -> list[Problem]:
    found = _identity(client)
    problems = [
        Problem(f"server {client.base_url} {name}", found.get(name), f"the learner has {value}", WAY_OUT)
        for name, value in own.items()
        if found.get(name) != value
    ]
    _resume(client)
    served = client.post(CHAT_ROUTE, PHASE, body=chat_body(RolloutRequest(messages), Sampling(1), seed=0))
    return problems + _prompt_difference(client, served["prompt_token_ids"], prompt_ids)


def _identity(client: ServerClient) -> dict[str, Any]:
    try:
        return client.get(IDENTITY_ROUTE, PHASE)
    except ServerError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        problem = Problem(
            f"server {client.base_url}",
            f"no {IDENTITY_ROUTE}",
            "must report how it reads prompts",
            "start it with `stage2 serve`, in the same version as the learner",
        )
        raise ConfigError((problem,)) from error


def _resume(client: ServerClient) -> None:
    """Resume a server whose learner died in a push: it is paused for good, and a request could end its engine."""
    if client.get("/is_paused", PHASE).get("is_paused"):
        logger.warning("server %s was left paused by a learner that ended during a push: resuming it", client.base_url)
        close_update(client)
        client.post("/resume", PHASE)


def check_swift_identity(
    clients: Sequence[ServerClient], messages: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]
) -> None:
    """Compare the ids of one prompt with those of every server of `swift rollout`, which reports nothing else.

    Raises:
        ConfigError: with every difference on every server.
        ServerError: a server does not answer.
    """

    def differences(client: ServerClient) -> list[Problem]:
        config = request_config(Sampling(max_new_tokens=1), seed=0)
        (answer,) = infer(client, [RolloutRequest(messages)], config, phase=PHASE, timeout_s=client.timeout_s)
        return _prompt_difference(client, answer["prompt_token_ids"], list(prompt_ids))

    if problems := list(chain(*all_at_once(differences, clients))):
        raise ConfigError(problems)


def _prompt_difference(client: ServerClient, theirs: list[int], ours: list[int]) -> list[Problem]:
    if theirs == ours:
        return []
    rule = f"the learner reads the same prompt as other ids, {first_difference(ours, theirs)}"
    return [Problem(f"server {client.base_url} prompt_token_ids", f"{len(theirs)} ids", rule, WAY_OUT)]


@dataclass(frozen=True)
class TrainingState:
    """Offloads the training state while an engine generates, and gathers weights that ZeRO-3 spreads."""

    offload: StateOffloader
    whole: GatheredWeights

    def attach(self, optimizer: torch.optim.Optimizer, wrapped: Any) -> None:
        """Set the optimizer, and the policy as DeepSpeed has wrapped it."""
        self.offload.find_optimizer = lambda: optimizer
        self.whole.find_engine = lambda: wrapped


def make_training_state(config: RunConfig, device: torch.device) -> TrainingState:
    """Return the offloading and gathering that this run's configuration asks for."""
    chosen = config.rollout_matching.offload
    offload = StateOffloader(
        DeviceMover(device),
        model=chosen.enabled and chosen.offload_model,
        optimizer=chosen.enabled and chosen.offload_optimizer,
    )
    return TrainingState(offload, GatheredWeights())


def local_rollouts(
    config: RunConfig, policy: Policy, cache: PromptCache, context: RunContext, state: TrainingState
) -> HfRollouts | ColocateRollouts:
    """Return the rollouts of `rollout_backend: hf`, or of `vllm.mode: colocate`."""
    matching, seed = config.rollout_matching, config.training.seed
    reporter, interrupt = context.reporter, context.interrupt
    whole = state.whole if shards_weights(config) else None
    if matching.rollout_backend == "hf":
        decoding, stops = Decoding.from_config(matching), lambda: interrupt.requested
        backend = HfBackend(policy.model, policy.encoder, decoding, cache=cache, whole=whole, stops=stops)
        return HfRollouts(backend, seed=seed, reporter=reporter, interrupt=interrupt)
    vllm = matching.vllm
    on_cpu = policy.device.type == "cpu"
    engine = ColocateEngine(
        engine_options(config, world_size=world_size(), on_cpu=on_cpu),
        engine_environment(on_cpu=on_cpu, eager=vllm.enforce_eager),
        sampling=Sampling.from_config(matching),
        prover=EngineProver(
            policy.probe, every=vllm.sync.verify_every, tolerance=vllm.proof_tolerance, proved=context.proved
        ),
        sleep_level=vllm.sleep_level,
        infer_batch_size=vllm.infer_batch_size,
        rounding=vllm.sync.rounding,
    )
    engine.stops = lambda: interrupt.requested
    rollouts = ColocateRollouts(
        engine, state.offload, sync_mode=vllm.sync.mode, seed=seed, reporter=reporter, interrupt=interrupt, whole=whole
    )
    rollouts.describe_engine()
    return rollouts


def engine_options(config: RunConfig, *, world_size: int, on_cpu: bool) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `LLM` in `world_size` learner processes.

    The engine never loads adapters: pushes merge them into the weights. Nothing of packing reaches it.
    """
    vllm = config.rollout_matching.vllm
    drafts = usable_drafts(vllm.speculative_config(on_cpu=on_cpu, objects=config.lists_objects))
    options: dict[str, Any] = {
        "model": config.model.model,
        "dtype": config.model.torch_dtype,
        "load_format": vllm.load_format or "dummy",
        "trust_remote_code": config.model.allow_remote_code,
        "tensor_parallel_size": vllm.resolved_tensor_parallel_size(world_size),
        "max_model_len": vllm.max_model_len,
        "max_num_seqs": vllm.max_num_seqs,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enforce_eager": vllm.enforce_eager,
        "disable_custom_all_reduce": vllm.disable_custom_all_reduce,
        "enable_sleep_mode": vllm.sleep_level > 0,
        "seed": config.training.seed,
        "disable_log_stats": True,
        "speculative_config": drafts,
        "per_request_spec_decode_metrics": "summary" if drafts else "none",
        **without_removed_options(vllm.passed_through()),
    }
    options |= dummy_load_options(options["load_format"])
    if limits := config.template.pixel_limits():
        options["mm_processor_kwargs"] = limits
    if world_size > 1:
        options["distributed_executor_backend"] = "external_launcher"  # torchrun has started the processes already
    if not on_cpu:
        options["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    return options


def engine_environment(*, on_cpu: bool, eager: bool) -> dict[str, str]:
    """Return the environment that vLLM reads when it is imported; existing variables are kept.

    eager: whether it computes without compiling (`enforce_eager`).
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if on_cpu:
        return {**variables, **ON_CPU, **(UNCOMPILED if eager else {})}
    return {**variables, **PRECOMPILED}
