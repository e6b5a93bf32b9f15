"""The follower, a detached process that relays a job into MLflow, watches its nodes and starts its retries."""
