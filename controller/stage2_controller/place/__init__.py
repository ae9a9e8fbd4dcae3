"""Where a job runs: the snapshot of nodes and the choice among them."""
