"""The operator: RolloutMatchingJob in, Deployment, Service, Job, ConfigMap and Secret out."""
