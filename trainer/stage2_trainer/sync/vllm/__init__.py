"""vLLM's side of a push: loading, merging, and the routes that the learner calls."""
