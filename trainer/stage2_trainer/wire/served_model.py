"""The model that is trained, as requests name it and as servers can hold it."""

from __future__ import annotations

POLICY_MODEL = "policy"  # the name under which every server serves it
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
MAX_LORA_RANK = LORA_RANKS[-1]
