"""Automatic checkpoints: what a program must save is found, and unmodified scripts resume."""
