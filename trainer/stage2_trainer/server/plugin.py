"""stage2's vLLM plugin (entry point group `vllm.general_plugins`): makes the gloo weight-transfer engine known."""

from __future__ import annotations

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "gloo"


def register() -> None:
    """Register the engine. vLLM calls this in each of its processes, in some more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "stage2_trainer.server.gloo_engine", "GlooEngine")
