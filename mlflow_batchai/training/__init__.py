"""What a training script may import; it travels to nodes, and importing it loads nothing else."""
