"""A real Kubernetes for machines with no container engine: built from Go modules, run as plain processes."""
