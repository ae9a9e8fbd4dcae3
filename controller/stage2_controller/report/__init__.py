"""What a job's conditions mean to people: explanations and events."""
