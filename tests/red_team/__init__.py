"""A red-team run: what a neighbour, a pod with a job's labels and a tenant get of a job that trains.

`python -m tests.red_team` on a cluster with stage2 prints every attempt at what docs/threat-model.md says is held.
"""
