"""What a run tells: progress, log, metrics."""
