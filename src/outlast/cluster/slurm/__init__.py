"""What the batch system Slurm says, and what it is told."""
