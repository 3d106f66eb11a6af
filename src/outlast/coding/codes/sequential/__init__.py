"""Gradient codes over consecutive steps, which use a delay of some rounds."""
