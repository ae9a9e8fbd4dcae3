"""A server's command line and environment, from a configuration. Pure functions, nothing heavy imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import Transport, resolve_transport
from stage2_trainer.sync.vllm.vllm_compat import (
    TRANSFER_BACKENDS,
    dummy_load_options,
    usable_drafts,
    without_removed_options,
)
from stage2_trainer.wire.credentials import Certificate
from stage2_trainer.wire.requests import LORA_RANKS, MAX_LORA_RANK, POLICY_MODEL
from stage2_trainer.wire.update_routes import UPDATE_ROUTES

Engine = Literal["vllm", "stub"]
Platform = Literal["cpu", "cuda"]

STUB_MODULE = "stage2_trainer.serve.stub.app"
VLLM_MODULE = "stage2_trainer.serve.vllm_server"
# vLLM puts each one around those before it, so the guard is the outermost.
MIDDLEWARE = [
    "stage2_trainer.sync.vllm.routes.UpdateWatch",
    "stage2_trainer.sync.vllm.routes.Stage2Routes",
    "stage2_trainer.serve.guard.TokenGuard",
]
UNLOGGED_ROUTES = (HEALTH_ROUTE, *UPDATE_ROUTES, "/weight_info")
"""Called at each push or every few seconds. The engine logs each push, and vLLM each call that fails."""
CPU_KV_CACHE_GIB = 1
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_THREADING_LAYER": "workqueue",
}
"""Of a vLLM on CPUs. Its n-gram drafts run on numba, whose OpenMP threads would fight with PyTorch's: a step took ten
times as long."""
PRECOMPILED = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
"""Switches off what vLLM 0.32 would compile with nvcc while it starts, which the image does not have: FlashInfer's
sampler, and its all-reduce between the GPUs of one server. Both are on by default."""
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Switches off what an eager vLLM on CPUs compiles all the same, with g++, when tokens are first sampled or scored:
small functions that torch.compile decorates. PyTorch reads it when vLLM is imported."""


@dataclass(frozen=True)
class Endpoint:
    """The address that a server listens on; certificate: with which it answers over TLS."""

    host: str
    port: int
    certificate: Certificate | None = None


def vllm_command(config: RunConfig, endpoint: Endpoint, platform: Platform) -> list[str]:
    """Return the command line of a vLLM server for this configuration."""
    vllm = config.rollout_matching.vllm
    on_cpu, copies = platform == "cpu", config.data_parallel_size
    drafts = usable_drafts(vllm.speculative_config(on_cpu=on_cpu, objects=config.lists_objects, copies=copies))
    options: dict[str, Any] = {
        "model": config.model.model,
        "served-model-name": POLICY_MODEL,
        "host": endpoint.host,
        "port": endpoint.port,
        **_certificate_options(endpoint),
        "dtype": config.model.torch_dtype,
        "load-format": vllm.resolved_load_format,
        "trust-remote-code": config.model.allow_remote_code,
        "tensor-parallel-size": vllm.resolved_tensor_parallel_size(world_size=1),
        "data-parallel-size": config.data_parallel_size if config.data_parallel_size > 1 else None,
        "max-model-len": vllm.max_model_len,
        "max-num-seqs": vllm.max_num_seqs,
        "enable-prefix-caching": vllm.enable_prefix_caching,
        "enforce-eager": vllm.enforce_eager,
        "disable-custom-all-reduce": vllm.disable_custom_all_reduce,
        **_adapter_options(config),
        "mm-processor-kwargs": config.template.pixel_limits() or None,
        "weight-transfer-config": {"backend": TRANSFER_BACKENDS[transport_of(config, platform)]},
        "speculative-config": drafts,
        "per-request-spec-decode-metrics": "summary" if drafts else None,
        "disable-access-log-for-endpoints": ",".join(UNLOGGED_ROUTES),
        **_flag_names(without_removed_options(vllm.passed_through())),
    }
    options |= _flag_names(dummy_load_options(vllm.resolved_load_format))
    if platform == "cuda":
        options["gpu-memory-utilization"] = vllm.gpu_memory_utilization
    guards = [word for middleware in MIDDLEWARE for word in ("--middleware", middleware)]  # vLLM takes one for a flag
    return [sys.executable, "-m", VLLM_MODULE, *guards, *flags(options)]


def transport_of(config: RunConfig, platform: Platform) -> Transport:
    """Return what this server receives weights over."""
    return resolve_transport(config.rollout_matching.vllm.sync.transport, on_cuda=platform == "cuda")


def stub_command(config: RunConfig, endpoint: Endpoint) -> list[str]:
    """Return the command line of the stub for this configuration."""
    options: dict[str, Any] = {
        "model": config.model.model,
        "host": endpoint.host,
        "port": endpoint.port,
        **_certificate_options(endpoint),
        "dtype": config.model.torch_dtype,
        "load-format": "dummy" if config.rollout_matching.vllm.resolved_load_format == "dummy" else "auto",
        "max-model-len": config.rollout_matching.vllm.max_model_len,
        "mm-processor-kwargs": config.template.pixel_limits() or None,
        "transport": transport_of(config, "cpu"),
        **_adapter_options(config),
    }
    return [sys.executable, "-m", STUB_MODULE, *flags(options)]


def environment(
    base: Mapping[str, str], platform: Platform, *, cores: int, servers_here: int, workers: int = 1, eager: bool = False
) -> dict[str, str]:
    """Return the environment of a server; what `base` sets itself is kept.

    cores: CPU cores of this machine. servers_here: servers that share it; workers: processes of each that compute, over
    all copies of the model. Each takes its part of the cores: threads that outnumber them spin while they wait.
    eager: whether vLLM computes without compiling (`enforce_eager`).
    """
    defaults = {
        "VLLM_SERVER_DEV_MODE": "1",  # opens the weight-update routes, which the guard closes to strangers
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # without it no request can name an adapter that came later
        "HF_HUB_OFFLINE": "1",
    }
    if platform == "cuda":
        defaults |= PRECOMPILED
    if platform == "cpu":
        defaults |= {**ON_CPU, "OMP_NUM_THREADS": str(max(1, cores // (servers_here * workers)))}
        if eager:
            defaults |= UNCOMPILED
        if workers == 1:
            # vLLM's offline engine heeds it; its server (0.32) has a process for the engine all the same, and with it
            # that process is a copy of the server's (`vllm_compat.copy_server_for_engine`).
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**defaults, **base}


def _certificate_options(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.certificate is None:
        return {}
    return {"ssl-certfile": endpoint.certificate.chain, "ssl-keyfile": endpoint.certificate.key}


def _adapter_options(config: RunConfig) -> dict[str, Any]:
    """One adapter at a time, of the learner's rank: each slot and each rank more takes memory and time."""
    if not config.rollout_matching.vllm.enable_lora:
        return {"enable-lora": False}
    rank = next((rank for rank in LORA_RANKS if rank >= config.tuner.lora_rank), MAX_LORA_RANK)
    return {"enable-lora": True, "max-lora-rank": rank}


def _flag_names(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in options.items()}


def flags(options: Mapping[str, Any]) -> list[str]:
    """Write options as flags: None is left out, booleans are switches, mappings are JSON, lists several words."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
