"""All of Outlast inside Hugging Face's `Trainer`, and inside those derived from it, such as TRL's.

trainer = Trainer(model, arguments, train_dataset=data)
add_outlast(trainer, "job.toml")       # or one by one: add_checkpoints, add_guard, add_stop, ...
trainer.train(resume_from_checkpoint=True)
"""

from outlast.integrations.installed import require

require("transformers", "5.23", "6")
require("accelerate", "1.15", "2")

from outlast.integrations.hf_trainer.adapter import (  # noqa: E402
    EnergyCallback,
    add_checkpoints,
    add_energy,
    add_guard,
    add_outlast,
    add_records,
    add_recover,
    add_stop,
    predicted,
)

__all__ = [
    "EnergyCallback",
    "add_checkpoints",
    "add_energy",
    "add_guard",
    "add_outlast",
    "add_records",
    "add_recover",
    "add_stop",
    "predicted",
]
