"""What a job reports: status, conditions, events, explanations."""
