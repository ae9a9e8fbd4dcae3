"""The children of a RolloutMatchingJob: one module for each kind, each a pure function from the job to a manifest."""
