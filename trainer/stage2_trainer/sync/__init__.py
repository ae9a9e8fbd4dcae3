"""Weight sync: the learner's weights become those of every rollout server, and both sides can prove it."""
