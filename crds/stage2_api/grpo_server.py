"""The rollout server of a GRPO run in the terms of the servers that all runs share.

Source: semantics sections 15.1 and 15.2.
"""

from __future__ import annotations

from stage2_api.custom import Custom
from stage2_api.grpo import Rlhf, RolloutServer
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.vllm import VllmServer, VllmServerEntry

_SAME = (
    "max_model_len", "gpu_memory_utilization", "enable_prefix_caching", "disable_custom_all_reduce",
    "enforce_eager", "limit_mm_per_prompt",
)  # fmt: skip
"""Keys of `rollout_matching.vllm` that `custom.extra.rollout_server` has with the prefix `vllm_`."""


def served_rollouts(rlhf: Rlhf, custom: Custom) -> RolloutMatching:
    """Return the rollout settings of a GRPO run in the terms that servers, sync and requests are written in."""
    own = custom.extra.rollout_matching
    server = custom.extra.rollout_server or RolloutServer(vllm_max_model_len=rlhf.max_completion_length + 1)
    vllm = own.vllm.model_copy(
        update={
            **{name: getattr(server, f"vllm_{name}") for name in _SAME},
            "mode": "server",
            "tensor_parallel_size": tensor_parallel_size(custom),
            "max_num_seqs": _max_num_seqs(custom, server),
            "server": _addresses(rlhf, own.vllm.server),
        }
    )
    return own.model_copy(
        update={
            "max_new_tokens": rlhf.max_completion_length,
            "temperature": rlhf.temperature,
            "repetition_penalty": rlhf.repetition_penalty,
            "rollout_backend": "vllm",
            "vllm": vllm,
        }
    )


def tensor_parallel_size(custom: Custom) -> int:
    """Return the number of GPUs of each copy of the model on the rollout server of a GRPO run."""
    server, forced = custom.extra.rollout_server, custom.grpo.batch_plan.rollout_server
    return _forced(custom, forced.force_vllm_tensor_parallel_size) or (server and server.vllm_tensor_parallel_size) or 1


def data_parallel_size(custom: Custom) -> int:
    """Return the number of copies of the model on the rollout server of a GRPO run."""
    server, forced = custom.extra.rollout_server, custom.grpo.batch_plan.rollout_server
    return _forced(custom, forced.force_vllm_data_parallel_size) or (server and server.vllm_data_parallel_size) or 1


def _addresses(rlhf: Rlhf, server: VllmServer) -> VllmServer:
    """Return where the server is reached: where a job has put it, else where `rlhf` says."""
    url = f"http://{rlhf.vllm_server_host[0]}:{rlhf.vllm_server_port[0]}"
    entry = VllmServerEntry(base_url=url, group_port=rlhf.vllm_server_group_port[0])
    return server.model_copy(update={"servers": server.servers or [entry], "timeout_s": rlhf.vllm_server_timeout})


def _max_num_seqs(custom: Custom, server: RolloutServer) -> int:
    forced = _forced(custom, custom.grpo.batch_plan.rollout_server.max_num_seqs_per_gpu)
    return forced * tensor_parallel_size(custom) if forced else server.vllm_max_num_seqs


def _forced(custom: Custom, value: int | None) -> int | None:
    """Return what the batch plan forces, where it is enabled."""
    return value if custom.grpo.batch_plan.enabled else None
