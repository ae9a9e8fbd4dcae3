"""The edge of a job's pods: what the controller passes into them, and what it reads of them."""
