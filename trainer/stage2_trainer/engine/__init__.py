"""Inside a rollout server: how it is started and guarded, and how it receives weights."""
