"""Jobs that name a Kueue queue."""
