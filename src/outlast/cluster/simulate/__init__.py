"""Discrete-event simulation of a cluster's scheduler."""
