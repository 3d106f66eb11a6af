"""All of Outlast in a loop on Hugging Face's `Accelerator`, which stays as it is.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
saving = add_checkpoints(accelerator, "runs/mine/store")    # save_state and load_state use a store
add_records(accelerator, "job.toml", saving=saving)         # accelerator.log writes records
memory = add_recover(accelerator, saving)                    # memory.keep() after each step
stop = add_stop(accelerator)                                # if stop(step): leave with exit code 3
"""

from outlast.integrations.installed import require

require("accelerate", "1.15", "2")

from outlast.integrations.accelerate.add import (  # noqa: E402
    AskStop,
    OutlastTracker,
    add_checkpoints,
    add_energy,
    add_guard,
    add_records,
    add_recover,
    add_stop,
)
from outlast.integrations.accelerate.checkpoints import (  # noqa: E402
    Remembering,
    Saving,
)

__all__ = [
    "AskStop",
    "OutlastTracker",
    "Remembering",
    "Saving",
    "add_checkpoints",
    "add_energy",
    "add_guard",
    "add_records",
    "add_recover",
    "add_stop",
]
