"""Joules of training: measured, planned on the time-energy frontier, and reported."""
