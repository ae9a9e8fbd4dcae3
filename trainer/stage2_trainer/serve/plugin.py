"""stage2's vLLM plugin (entry point group `vllm.general_plugins`): weight transfer, adapters, what the image knows."""

from __future__ import annotations

import os
from pathlib import Path

from vllm import envs
from vllm.lora.resolver import LoRAResolverRegistry

from stage2_trainer.sync.vllm.adapter_resolver import ReceivedAdapters
from stage2_trainer.sync.vllm.vllm_compat import offer_model_inspections, register_transfer_engine

ENGINES = {
    "tcp": ("stage2_trainer.sync.vllm.weight_engine", "TcpEngine"),
    "stage2-nccl": ("stage2_trainer.sync.vllm.weight_engine", "NcclEngine"),
}
RESOLVER = "stage2"
INSPECTIONS_VARIABLE = "STAGE2_MODELINFOS"
"""Set in the image: the folder with what vLLM found out about models there."""


def register() -> None:
    """Register engines and resolver, and offer answers about models.

    vLLM calls this in each of its processes, in some more than once.
    """
    for backend, (module, name) in ENGINES.items():
        register_transfer_engine(backend, module, name)
    if RESOLVER not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(RESOLVER, ReceivedAdapters())
    if kept := os.environ.get(INSPECTIONS_VARIABLE):
        offer_model_inspections(Path(kept), Path(envs.VLLM_CACHE_ROOT))
