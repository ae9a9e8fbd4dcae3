"""A rollout server: its launch, its guard, vLLM's plugin, and the stub."""
