"""Telemetry of a run: progress, log, metrics."""
