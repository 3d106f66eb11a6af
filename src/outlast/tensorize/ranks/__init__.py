"""Tensorized layers."""
