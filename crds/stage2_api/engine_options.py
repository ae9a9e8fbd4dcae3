"""vLLM's engine arguments that a person may set by their names there: those that say how fast and with how much memory.

What a server serves, where it listens, who may ask, which code it loads and how weights reach it belong to stage2: with
`middleware`, `host`, `worker_cls` or `trust_remote_code` a file would switch the guard off, or run code in the server.
"""

from __future__ import annotations

ENGINE_OPTIONS = frozenset(
    {
        "all2all_backend", "async_scheduling", "attention_backend", "block_size", "cpu_offload_gb",
        "cudagraph_capture_sizes", "disable_cascade_attn", "disable_chunked_mm_input",
        "disable_hybrid_kv_cache_manager", "disable_log_stats", "disable_sliding_window",
        "enable_batch_sharded_sampling", "enable_chunked_prefill", "enable_dbo", "enable_eplb",
        "enable_expert_parallel", "enable_flashinfer_autotune", "enable_log_requests", "enable_prefix_caching",
        "enforce_eager", "eplb_config", "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
        "kv_cache_memory_bytes", "limit_mm_per_prompt", "linear_backend", "long_prefill_token_threshold",
        "max_cudagraph_capture_size", "max_logprobs", "max_num_batched_tokens", "max_num_scheduled_tokens",
        "max_num_seqs", "max_parallel_loading_workers", "mm_encoder_attn_backend", "mm_encoder_tp_mode",
        "mm_processor_cache_gb", "mm_processor_cache_type", "moe_backend", "num_gpu_blocks_override", "numa_bind",
        "optimization_level", "performance_mode", "quantization", "safetensors_load_strategy", "scheduling_policy",
        "seed", "skip_mm_profiling", "stream_interval", "swap_space", "ubatch_size",
    }
)  # fmt: skip


def foreign_options(options: dict[str, object] | None) -> list[str]:
    """Return the names of `options` that a person may not set, however they are spelled."""
    return sorted(name for name in options or {} if name.replace("-", "_") not in ENGINE_OPTIONS)
