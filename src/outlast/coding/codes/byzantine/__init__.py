"""Assignments and votes that stand workers who send wrong results."""
