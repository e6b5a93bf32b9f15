"""What a node uses of its machine, measured while a job runs there."""
