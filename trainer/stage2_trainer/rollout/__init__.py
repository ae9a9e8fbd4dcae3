"""Rollouts: one Backend protocol and the client of several rollout servers."""
