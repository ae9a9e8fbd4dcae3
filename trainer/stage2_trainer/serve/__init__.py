"""A rollout server: its launch, its guard, vLLM's plugin, and the stub."""

from stage2_api.pod.first_process import end_at_sigterm

end_at_sigterm()  # `stage2 serve` becomes the server's process, whose imports take seconds
