"""Gradients that survive slow and dead workers, with a certificate of their error."""
