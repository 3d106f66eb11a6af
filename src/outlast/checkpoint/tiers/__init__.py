"""Tiers of a store: copies of versions in slower, safer places."""

from outlast.checkpoint.tiers.place import Place, not_held
from outlast.checkpoint.tiers.tier import DrainResult, Tier
from outlast.checkpoint.tiers.tiers import Tiers

__all__ = ["DrainResult", "Place", "Tier", "Tiers", "not_held"]
