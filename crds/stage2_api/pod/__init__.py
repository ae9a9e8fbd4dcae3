"""What crosses the edge of a job's pods: what the controller passes in, and what it reads of them."""
