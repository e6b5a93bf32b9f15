"""The detached process that relays a job into MLflow and keeps its nodes: attempts, retries, the lease."""
