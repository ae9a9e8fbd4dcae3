"""The cluster: requests to the API server, watches, what is observed of a job, and leader election."""
