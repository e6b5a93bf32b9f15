"""Mounting a job's volumes on a node, and undoing it however the job ended."""
