"""stage2's vLLM plugin (entry point group `vllm.general_plugins`): weight-transfer engines, and adapters received."""

from __future__ import annotations

from vllm.lora.resolver import LoRAResolverRegistry

from stage2_trainer.engine.adapter_resolver import ReceivedAdapters
from stage2_trainer.engine.vllm_compat import register_transfer_engine

ENGINES = {
    "gloo": ("stage2_trainer.engine.gloo", "GlooEngine"),
    "stage2-nccl": ("stage2_trainer.engine.nccl", "AdapterNcclEngine"),
}
RESOLVER = "stage2"


def register() -> None:
    """Register engines and resolver. vLLM calls this in each of its processes, in some more than once."""
    for backend, (module, name) in ENGINES.items():
        register_transfer_engine(backend, module, name)
    if RESOLVER not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(RESOLVER, ReceivedAdapters())
