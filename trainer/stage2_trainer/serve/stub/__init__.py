"""A second, quick rollout server with vLLM's routes, held to the same contract tests."""
