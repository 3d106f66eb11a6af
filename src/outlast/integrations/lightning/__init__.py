"""Outlast inside Lightning's `Trainer`.

trainer = Trainer(max_steps=1000, **with_outlast("job.toml"))
trainer.fit(model, loader, ckpt_path="last")
"""

from outlast.integrations.installed import require

require("lightning", "2.6", "2.7")

from outlast.integrations.lightning.callback import (  # noqa: E402
    EnergyCallback,
    OutlastCallback,
    with_outlast,
)

__all__ = ["EnergyCallback", "OutlastCallback", "with_outlast"]
