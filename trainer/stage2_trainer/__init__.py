"""The learner, the rollout servers, and what they share."""
