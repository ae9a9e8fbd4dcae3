"""GRPO: rewards, advantages and the learner that trains on rollouts of one server."""
