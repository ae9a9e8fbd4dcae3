"""A colocated engine's arguments and environment, from a configuration. Pure functions, nothing heavy imported."""

from __future__ import annotations

from typing import Any

from stage2_api.runconfig import RunConfig
from stage2_trainer.serve.server_command import CPU_KV_CACHE_GIB, PRECOMPILED, UNCOMPILED
from stage2_trainer.sync.vllm.vllm_compat import dummy_load_options, without_removed_options


def engine_options(config: RunConfig, *, world_size: int, on_cpu: bool) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `LLM` in `world_size` learner processes.

    The engine never loads adapters: they are merged into the weights that it is given. It knows nothing of packing.
    """
    vllm = config.rollout_matching.vllm
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
        **without_removed_options(vllm.passed_through()),
    }
    options |= dummy_load_options(options["load_format"])
    if limits := _pixel_limits(config):
        options["mm_processor_kwargs"] = limits
    if world_size > 1:
        options["distributed_executor_backend"] = "external_launcher"  # torchrun has started the processes already
    if not on_cpu:
        options["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    return options


def engine_environment(*, on_cpu: bool, eager: bool) -> dict[str, str]:
    """Return the environment that vLLM reads when it is imported; what is set already is kept.

    eager: whether it computes without compiling (`enforce_eager`).
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if on_cpu:
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {**variables, **UNCOMPILED} if eager else variables
    return {**variables, **PRECOMPILED}


def _pixel_limits(config: RunConfig) -> dict[str, int]:
    limits = {"min_pixels": config.template.min_pixels, "max_pixels": config.template.max_pixels}
    return {name: value for name, value in limits.items() if value is not None}
