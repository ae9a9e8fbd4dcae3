"""Builders of a job's children: pure functions from a parsed job to finished manifests."""
