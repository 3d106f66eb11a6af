"""Outlast inside Lightning's `Trainer`.

trainer = Trainer(max_steps=1000, **with_outlast("job.toml"))
trainer.fit(model, loader, ckpt_path="last")
"""

from outlast.integrations.lightning.arguments import with_outlast
from outlast.integrations.lightning.callback import OutlastCallback
from outlast.integrations.lightning.energy import EnergyCallback

__all__ = ["EnergyCallback", "OutlastCallback", "with_outlast"]
