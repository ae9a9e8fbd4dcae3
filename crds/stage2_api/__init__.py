"""The contract of stage2: pydantic models of RolloutMatchingJob and RunConfig, and nothing else."""
