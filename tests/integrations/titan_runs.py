"""torchtitan's debug model, optimizers, schedules and data loader in a loop like its trainer's.

Its `Trainer` needs CUDA; everything else here is its own, on gloo and the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, full_dtensor, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from outlast.checkpoint import list_versions, storage_of
from outlast.checkpoint.version import is_published
from outlast.integrations.torchtitan import OutlastCheckpointManager

SAMPLES, LENGTH, SYMBOLS = 4, 16, 64


def settings(**given: Any) -> Any:
    """Settings of a manager that saves everything, every second step."""
    return OutlastCheckpointManager.Config(
        **{"enable": True, "interval": 2, "last_save_model_only": False, **given}
    )


def steps_in(folder: Path) -> list[int]:
    """Steps of the versions of a run that count."""
    storage = storage_of(folder / "checkpoint")
    return [each.step for each in list_versions(storage) if is_published(storage, each)]


class Texts(IterableDataset):
    """Each data-parallel rank's share of a text; knows where it stands.

    Args:
        rank: Whose share it is.
        ranks: That have one.
        length: Of a share; None: endless.
    """

    def __init__(self, rank: int, ranks: int, length: int | None = None) -> None:
        self.rank, self.ranks, self.length, self.position = rank, ranks, length, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position != self.length:
            number = self.position * self.ranks + self.rank
            self.position += 1
            generator = torch.Generator().manual_seed(number)
            yield torch.randint(SYMBOLS, (LENGTH + 1,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def small_model(converters: list[Any] | None = None) -> Any:
    """The registry's debug model: two layers of it, with an attention that a CPU can train."""
    spec = model_registry("debugmodel", converters=converters)
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


class Titan:
    """What `Trainer` makes and does, for a model of `small_model`.

    Args:
        manager: Settings of a checkpoint manager.
        folder: Where the run's files go.
        converters: Of the model.
        steps: Of the schedule.
        backend: How parameters and activations are distributed; ``spmd_types`` needs a newer torch.
    """

    def __init__(
        self,
        manager: Any,
        folder: Path,
        converters: list[Any] | None = None,
        steps: int = 8,
        backend: str = "partial_dtensor",
    ) -> None:
        logging.disable(logging.WARNING)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        parallel_dims.device_type = "cpu"
        rank, size = dist.get_rank(), dist.get_world_size()
        self.step = self.ntokens_seen = 0
        self.steps = steps
        self.load_step = manager.load_step
        spec = small_model(converters)
        parallelism = ParallelismConfig(data_parallel_shard_degree=size, spmd_backend=backend)
        training = TrainingConfig(
            mixed_precision_param="float32", mixed_precision_reduce="float32", seq_len=LENGTH
        )
        config = llama3_debugmodel()
        config.model_spec, config.parallelism, config.training = spec, parallelism, training
        spec.model.update_from_config(config=config)
        set_spmd_backend(backend)
        torch.manual_seed(0)
        with torch.device("meta"):
            model = spec.model.build()
        model.verify_module_protocol()
        self.dims = ParallelDims.from_config(parallelism, size)
        self.model = spec.parallelize_fn(
            model,
            parallel_dims=self.dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder=str(folder),
        )
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no reduction that also multiplies.
                module.set_force_sum_reduction_for_comms(True)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=torch.device("cpu"))
        optimizers = default_adamw(lr=3e-3)
        optimizers.implementation = "for-loop"
        self.optimizers = optimizers.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=steps
        )
        self.loader = ParallelAwareDataloader(
            Texts(rank, size), rank, size, batch_size=SAMPLES // size
        )
        self.manager = manager.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=spec.state_dict_adapter(spec.model, None),
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(
        self, at: Callable[[int], None] = lambda _: None, *, places_data: bool = False
    ) -> dict[int, float]:
        """Load, and train up to the last step.

        Args:
            at: Called before each save.
            places_data: Put the data where the step says, as a loader of one's own could.

        Returns:
            Loss by step.
        """
        self.manager.load(step=self.load_step)
        if places_data:
            self.loader.dataset.position = self.step * SAMPLES // dist.get_world_size()
        batches, losses = iter(self.loader), {}
        try:
            while self.step < self.steps:
                self.step += 1
                losses[self.step] = self.train_step(next(batches))
                at(self.step)
                self.manager.save(self.step, last_step=self.step == self.steps)
        finally:
            self.manager.close()
        return losses

    def train_step(self, tokens: torch.Tensor) -> float:
        self.optimizers.zero_grad()
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.dims.spmd_backend == "full_dtensor":
            inputs, _, _ = full_dtensor.parallelize_inputs(self.dims, inputs, labels, {})
        logits = self.model(inputs)
        if isinstance(logits, DTensor):
            logits = logits.to_local()
        # As in torchtitan: the sum over this rank's tokens, over the tokens of all ranks.
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ) / (SAMPLES * LENGTH)
        loss.backward()
        self.manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()
        self.ntokens_seen += labels.numel()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item()
