"""What a training script may import; it travels with the job to the nodes, and importing it loads nothing else."""
