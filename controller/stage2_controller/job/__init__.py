"""The parts of a job's spec: policy, containers, names, credentials, rules of templates."""
