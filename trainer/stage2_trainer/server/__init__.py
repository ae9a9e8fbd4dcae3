"""A rollout server: how it is started, guarded, reached, and given new weights."""
