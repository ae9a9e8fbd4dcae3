"""The controller's process: its queue, the pass over one job, its metrics and its start."""
