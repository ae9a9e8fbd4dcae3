"""Builders of a job's children, one module a kind; pure."""
