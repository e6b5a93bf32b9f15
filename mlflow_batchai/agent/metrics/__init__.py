"""System metrics of a node while a job runs there."""
