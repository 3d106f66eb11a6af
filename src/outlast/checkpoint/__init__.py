"""Versioned, verified checkpoints of a distributed training state.

from outlast.checkpoint import CheckpointStore
store = CheckpointStore("checkpoints/", keep=3)
state = {"model": model, "optimizer": optimizer}
handle = store.save_async(step, state)      # returns when the state is copied
handle.wait()                               # raises CheckpointError if it was not published
restored = store.restore(state)             # newest version that verifies, or None
"""

from outlast.checkpoint.store import CheckpointStore, Restored, SaveHandle, SaveResult
from outlast.checkpoint.version import Version, list_versions, verify

__all__ = [
    "CheckpointStore",
    "Restored",
    "SaveHandle",
    "SaveResult",
    "Version",
    "list_versions",
    "verify",
]
