"""A folder from which both stages are trained: records, a prepared model, a job file for each, and the commands."""
