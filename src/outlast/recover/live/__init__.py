"""Live recovery: replica groups that continue, in their processes, when one of them dies."""

from outlast.recover.live.groups import LiveGroups, LiveStep, SavedElsewhere
from outlast.recover.live.lighthouse import Lighthouse, require_torchft

__all__ = ["Lighthouse", "LiveGroups", "LiveStep", "SavedElsewhere", "require_torchft"]
