"""Replay logs: training steps as their gradients."""

from outlast.checkpoint.replay.log import ReplayLog, has_optimizer
from outlast.checkpoint.replay.replayed import logs_after, replay

__all__ = ["ReplayLog", "has_optimizer", "logs_after", "replay"]
