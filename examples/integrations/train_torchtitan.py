"""Recipes of torchtitan 0.3 with Outlast beside them, one with structured layers.

    torchrun --nproc-per-node=8 -m torchtitan.train --module train_torchtitan --config dense
    outlast ckpt ls outputs/checkpoint
    outlast report outputs

The same command continues after a crash, a signal or the end of a Slurm job's time, on any number
of GPUs (with another data-parallel degree add `--checkpoint.exclude_from_loading dataloader`).
"""

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from outlast.integrations.torchtitan import TensorizeConverter, use_outlast


def dense() -> Trainer.Config:
    """The debug model as it is: checkpoints in the background, a guard, records with energy."""
    config = use_outlast(
        llama3_debugmodel(),
        # A file may be in their place, or beside them: use_outlast(recipe, "job.toml", ...).
        overrides=["guard.policy=linear"],
        enable=True,
        interval=5,
        async_mode="async_with_pinned_mem",
        last_save_model_only=False,
    )
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = FullAC.Config()
    return config


def tensorized() -> Trainer.Config:
    """The same with feed-forward layers of two factors and a nonlinearity between them."""
    config = dense()
    layers = TensorizeConverter.Config(form="cola", rank=0.25, match=["*.feed_forward.*"])
    config.model_spec = model_registry("debugmodel", converters=[layers])
    return config
