"""Tiers of a store: copies of versions in slower, safer places."""

from outlast.checkpoint.tiers.tiers import DrainResult, Place, Tier, Tiers, not_held

__all__ = ["DrainResult", "Place", "Tier", "Tiers", "not_held"]
