"""vLLM's way to an adapter by its name: the folder in which the server's workers keep what they were sent."""

from __future__ import annotations

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from stage2_trainer.sync.vllm.adapter_store import adapter_path

ID_OF_CALLER = 1  # vLLM replaces it by an id of its own


class ReceivedAdapters(LoRAResolver):
    """A resolver of adapters that came over the transfer group."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter's request; None if this server was not sent an adapter of this name."""
        path = adapter_path(lora_name)
        if path is None or not path.is_dir():
            return None
        return LoRARequest(lora_name=lora_name, lora_int_id=ID_OF_CALLER, lora_path=str(path))
