"""stage2's vLLM plugin (entry point group `vllm.general_plugins`): weight transfer, adapters, drafts, what the image
knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from stage2_trainer.sync.vllm.adapter_store import adapter_path
from stage2_trainer.sync.vllm.vllm_compat import (
    TRANSFER_BACKENDS,
    draft_frames_on_gpus,
    expand_sampling_on_cpus,
    offer_model_inspections,
    quiet_updates,
    read_every_reply,
    register_transfer_engine,
)

ID_OF_CALLER = 1  # vLLM replaces it by an id of its own


class ReceivedAdapters(LoRAResolver):
    """A resolver of adapters that came over the transfer group."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter's request; None if this server was not sent an adapter of this name."""
        path = adapter_path(lora_name)
        if path is None or not path.is_dir():
            return None
        return LoRARequest(lora_name=lora_name, lora_int_id=ID_OF_CALLER, lora_path=str(path))


RESOLVER = "stage2"
INSPECTIONS_VARIABLE = "STAGE2_MODELINFOS"
"""Set in the image: the folder with what vLLM found out about models there."""


def _create_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
    from stage2_trainer.serve.frame_speculator import FrameSpeculator  # imports Triton

    return FrameSpeculator(vllm_config, device, req_states)


def register() -> None:
    """Register engines and resolver, offer answers about models, and quiet the log.

    vLLM calls this in each of its processes, in some more than once.
    """
    for backend in TRANSFER_BACKENDS.values():
        register_transfer_engine(backend, "stage2_trainer.sync.vllm.weight_engine", "ReceivingEngine")
    quiet_updates()
    read_every_reply()
    expand_sampling_on_cpus()
    draft_frames_on_gpus(_create_speculator)
    if RESOLVER not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(RESOLVER, ReceivedAdapters())
    if kept := os.environ.get(INSPECTIONS_VARIABLE):
        offer_model_inspections(Path(kept), Path(envs.VLLM_CACHE_ROOT))
