"""torchtitan's own `Trainer` on gloo and the CPU, with a model of `titan_runs.small_model`.

It asks for a CUDA device, and for a function of a newer torch than 2.13. These questions are
answered here; the set-up, the steps and the loop are torchtitan's own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from titan_runs import LENGTH, SAMPLES, Texts, small_model
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from outlast.guard.inject import inject, parse_faults
from outlast.integrations.torchtitan import use_outlast

STEPS = 8


class Processor:
    """What torchtitan asks of ``torch.cuda``, answered for a CPU."""

    set_device = synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    memory_stats = staticmethod(lambda _: {})
    get_device_name = staticmethod(lambda _: "CPU")

    @staticmethod
    def get_device_properties(_: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=psutil.virtual_memory().total)


def onto_the_cpu() -> None:
    """Let torchtitan's modules, all of which are imported, use the CPU of this process."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "torchtitan":
            continue
        if vars(module).get("device_type") == "cuda":
            module.device_type = "cpu"
        if vars(module).get("device_module") is torch.cuda:
            module.device_module = Processor
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_pg_timeout


class TextLoader(ParallelAwareDataloader):
    """Batches of `Texts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        length: int | None = None

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(
            Texts(dp_rank, dp_world_size, config.length),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            collate_fn=_inputs_and_labels,
        )


def _inputs_and_labels(texts: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.stack(texts)
    return {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


class Unread(BaseTokenizer):
    """The texts are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def recipe(folder: Path, steps: int = STEPS) -> Any:
    """The debug model's recipe, made small: 4 samples a step, one at a time on each rank."""
    config = llama3_debugmodel()
    config.model_spec = spec = small_model()
    own = spec.parallelize_fn

    def parallelize(*arguments: Any, **options: Any) -> Any:
        model = own(*arguments, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no reduction that also multiplies.
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelize
    config.dump_folder = str(folder)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    config.optimizer = default_adamw(lr=3e-3)
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2)
    config.training = TrainingConfig(
        local_batch_size=1,
        global_batch_size=SAMPLES,
        seq_len=LENGTH,
        steps=steps,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
        mixed_precision_reduce="float32",
    )
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    config.dataloader = TextLoader.Config()
    config.tokenizer = Unread.Config()
    config.activation_checkpoint = FullAC.Config()
    config.comm.trace_buf_size = 0
    config.debug.seed = 0
    return config


@dataclass
class Plan:
    """What one rank is to do.

    Attributes:
        folder: For the run's files.
        job: Text of the job; None: torchtitan's own trainer, without checkpoints.
        steps: Of the training.
        interval: Steps between checkpoints.
        fault: That is injected into the guard.
        signals_at: Steps done when rank 1 sends itself SIGTERM; 0: it does not.
        dies_at: Steps done when the last rank kills itself, at torchrun's first start; 0: it does
            not.
        meter: A file whose joules go up by 2 with each step of rank 0.
        texts: That each rank has; None: they do not end.
        load_step: At which the recipe begins; -1: at the newest.
        model_only: Whether the last save is of the model alone.
        signals_loading: Whether SIGTERM comes while the checkpoint is loaded.
        by_name: Whether the trainer tells its figures by their names, as one of one's own may.
    """

    folder: Path
    job: str | None = None
    steps: int = STEPS
    interval: int = 4
    fault: str = ""
    signals_at: int = 0
    dies_at: int = 0
    meter: Path | None = None
    texts: int | None = None
    load_step: int = -1
    model_only: bool = False
    signals_loading: bool = False
    by_name: bool = False

    def trainer(self) -> Any:
        """Build it, as torchtitan's `train.main` does."""
        config = recipe(self.folder, self.steps)
        config.dataloader = TextLoader.Config(length=self.texts)
        if self.job is not None:
            path = self.folder.parent / f"job{os.environ['RANK']}.toml"
            path.write_text(self.job)
            config = use_outlast(
                config,
                path,
                enable=True,
                interval=self.interval,
                async_mode="async_with_pinned_mem",
                last_save_model_only=self.model_only,
                load_step=self.load_step,
            )
        return config.build()

    def happen(self, step: int) -> None:
        """What befalls this rank when it has done a step."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.meter is not None and dist.get_rank() == 0:
            self.meter.write_text(f"{float(self.meter.read_text()) + 2.0}\n")
        if step == self.signals_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == self.dies_at and dist.get_rank() == dist.get_world_size() - 1 and first:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Outcome:
    """What a training gave.

    Attributes:
        losses: By step, as torchtitan logs them.
        step: The last one.
        code: With which it ended; 0 for one that was complete.
        digest: Of the last weights.
        tokens: As torchtitan counts them on this rank.
    """

    losses: dict[int, float] = field(default_factory=dict)
    step: int = 0
    code: int = 0
    digest: str = ""
    tokens: int = 0


def train(plan: Plan) -> Outcome:
    """Do what the plan says, as torchtitan's `train.main` does."""
    onto_the_cpu()
    found = Outcome()
    trainer = plan.trainer()
    _watch(trainer, plan, found)
    if plan.signals_loading:
        own_load = trainer.checkpointer._load

        def load(*arguments: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return own_load(*arguments, **options)

        trainer.checkpointer._load = load
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    except SystemExit as end:
        found.code = int(end.code or 0)
    else:
        trainer.close()
    found.step, found.tokens = trainer.step, trainer.ntokens_seen
    found.digest = digest_of(trainer.model_parts[0])
    return found


def _watch(trainer: Any, plan: Plan, found: Outcome) -> None:
    own_step, own_log = trainer.train_step, trainer.metrics_processor.log
    own_question = trainer.should_continue_training

    def train_step(batches: Any) -> None:
        own_step(batches)
        plan.happen(trainer.step)

    def log(step: int, loss: float, *rest: Any, **options: Any) -> None:
        found.losses[step] = loss
        own_log(step, loss, *rest, **options)

    def name_figures() -> None:
        beside = trainer.metrics_processor.log

        def log_by_name(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
            beside(step, global_avg_loss=loss, global_max_loss=largest, grad_norm=norm, **more)

        trainer.metrics_processor.log = log_by_name
        plan.by_name = False

    def should_continue_training() -> bool:
        if plan.by_name:
            name_figures()
        goes_on = own_question()
        if plan.fault and trainer._runtime.guard.guard.watch.fault_hook is None:
            guard = trainer._runtime.guard.guard
            inject(guard, parse_faults([plan.fault]), rank=dist.get_rank())
        return goes_on

    trainer.train_step = train_step
    trainer.metrics_processor.log = log
    trainer.should_continue_training = should_continue_training


def digest_of(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, each in sorted(model.named_parameters()):
        found.update(name.encode() + each.detach().full_tensor().numpy().tobytes())
    return found.hexdigest()
