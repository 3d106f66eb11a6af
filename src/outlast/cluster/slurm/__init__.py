"""Interface to the batch system Slurm: commands, their output, batch scripts."""
