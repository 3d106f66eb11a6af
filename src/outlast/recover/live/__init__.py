"""Live recovery: replica groups that go on, in their processes, when one of them dies."""

from outlast.recover.live.groups import LiveGroups
from outlast.recover.live.lighthouse import Lighthouse, require_torchft
from outlast.recover.live.step import LiveStep, Refuge

__all__ = ["Lighthouse", "LiveGroups", "LiveStep", "Refuge", "require_torchft"]
