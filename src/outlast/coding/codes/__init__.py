"""Constructions of gradient codes, one family per module."""
