"""A job, seen without a cluster: its children, its place, its status. Pure: no client, no clock, no task."""
