"""Recovery without a checkpoint: survive dead ranks, shrink, grow, and keep the same run."""
