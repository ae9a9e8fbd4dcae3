"""The learner's weights on their way to rollout servers: what is sent, how, when, and how it is proved."""
