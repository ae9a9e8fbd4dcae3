"""Sources of rollouts: servers over HTTP, or an engine in the learner's own process."""
