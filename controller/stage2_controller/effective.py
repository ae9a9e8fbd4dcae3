"""The effective training configuration of a job: what the person wrote plus the servers' addresses."""

import copy
from collections.abc import Sequence
from typing import Any

from stage2_api.job import RolloutMatchingJob

from stage2_api.runconfig import RunConfig, parse_run_config

ROOT = "spec.config"


def has_servers(job: RolloutMatchingJob) -> bool:
    """Whether rollouts come from servers; in colocate mode and with the hf backend the learner generates itself."""
    matching = job.spec.config.rollout_matching
    return bool(matching.rollout_backend == "vllm" and matching.vllm.mode == "server")


def run_config(job: RolloutMatchingJob, addresses: Sequence[tuple[str, int]]) -> tuple[dict[str, Any], RunConfig]:
    """The configuration as written and as parsed, with `addresses` (base URL, group port) as its servers.

    Addresses that the person wrote are replaced: the plan starts the servers, so it alone knows where they listen.
    Raises ConfigError.
    """
    raw: dict[str, Any] = copy.deepcopy(job.spec.config.model_dump(mode="json", by_alias=True, exclude_unset=True))
    if addresses:
        vllm = raw["custom"]["extra"]["rollout_matching"]["vllm"]
        server = vllm.setdefault("server", {})
        for legacy in ("base_url", "group_port"):
            server.pop(legacy, None)
        server["servers"] = [{"base_url": url, "group_port": group_port} for url, group_port in addresses]
    return raw, parse_run_config(raw, root=ROOT)
