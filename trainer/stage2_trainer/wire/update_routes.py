"""vLLM's routes that an update of weights calls, in their order."""

from __future__ import annotations

INIT_ROUTE = "/init_weight_transfer_engine"
PAUSE_ROUTE = "/pause"
START_ROUTE = "/start_weight_update"
UPDATE_ROUTE = "/update_weights"
FINISH_ROUTE = "/finish_weight_update"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
RESET_AFTER_VISION = ("/reset_mm_cache", "/reset_encoder_cache")
RESUME_ROUTE = "/resume"

UPDATE_ROUTES = (
    INIT_ROUTE, PAUSE_ROUTE, START_ROUTE, UPDATE_ROUTE, FINISH_ROUTE, RESET_PREFIX_CACHE, *RESET_AFTER_VISION,
    RESUME_ROUTE,
)  # fmt: skip
