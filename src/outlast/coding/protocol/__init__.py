"""Gradient coding over torch.distributed."""
