"""Outlast inside DeepSpeed.

- `OutlastCheckpointEngine`: what ``engine.save_checkpoint`` and ``engine.load_checkpoint`` use;
- `Run`: a loop's checkpoints, guard, energy, records and stop in time.

The import refuses what DeepSpeed would not survive: another version, and the lock that a killed
build of one of its operators has left, for which every later start would wait without end.
"""

from __future__ import annotations

from outlast.integrations.deepspeed.run import refuse_stale_locks
from outlast.integrations.installed import require

require("deepspeed", "0.19", "0.20")
refuse_stale_locks()

from outlast.integrations.deepspeed.checkpoints import OutlastCheckpointEngine  # noqa: E402
from outlast.integrations.deepspeed.run import Run  # noqa: E402

__all__ = ["OutlastCheckpointEngine", "Run"]
