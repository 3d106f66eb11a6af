"""Recipes of torchtitan 0.3 whose checkpoints go into a store, one with structured layers.

    torchrun --nproc-per-node=8 -m torchtitan.train --module train_torchtitan --config dense
    outlast ckpt ls outputs/checkpoint

The same command goes on after a crash, a signal or the end of a Slurm job's time, on any number of
GPUs (with another data-parallel degree add `--checkpoint.exclude_from_loading dataloader`).
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from outlast.integrations.torchtitan import TensorizeConverter, use_outlast


def dense() -> Trainer.Config:
    """The debug model as it is; checkpoints in the background, differences between full ones."""
    return use_outlast(
        llama3_debugmodel(),
        enable=True,
        interval=5,
        async_mode="async_with_pinned_mem",
        last_save_model_only=False,
        delta_chain=4,
    )


def tensorized() -> Trainer.Config:
    """The same with feed-forward layers of two factors and a nonlinearity between them."""
    config = dense()
    layers = TensorizeConverter.Config(form="cola", rank=0.25, match=["*.feed_forward.*"])
    config.model_spec = model_registry("debugmodel", converters=[layers])
    return config
