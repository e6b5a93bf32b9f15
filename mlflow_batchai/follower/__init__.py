"""The follower, a detached process that relays a user's jobs into MLflow, watches their nodes and starts their retries."""
