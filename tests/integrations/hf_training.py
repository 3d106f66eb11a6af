"""A tiny Llama in Hugging Face's Trainer, trained in forked processes that may kill themselves."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from forked import run_ranks
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from outlast.integrations.hf_trainer import add_checkpoints, add_guard, add_outlast, add_stop
from outlast.job import load_loop_job

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES, LENGTH, WORDS = 64, 16, 48
QUIET = ["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=1"]

kept: list[Any] = []
"""Trainers of a process until it ends: a group that is let go of while its threads still need the
interpreter may wait for them forever."""


@dataclass
class Plan:
    """What one process is to do.

    Attributes:
        output: Directory of the trainer.
        add: Names of what is added; ``outlast`` is all.
        settings: Overrides of a job, for ``outlast``.
        fault: That is injected into the guard.
        dies_at: Steps done when the process kills itself; 0: it does not.
        waits: Whether the save under way is waited for before that.
        signals_at: Steps done when `signals_rank` sends itself SIGTERM; 0: it does not.
        exits_at: Steps done when a callback calls `sys.exit(4)`; 0: none does.
        form: Of the tensorized layers; empty: none are.
        patience: Of an `EarlyStoppingCallback`, which has a state; 0: there is none.
        options: Of TrainingArguments.
    """

    output: str
    add: tuple[str, ...] = ("checkpoints",)
    settings: tuple[str, ...] = ()
    fault: str = ""
    resume: Any = None
    steps: int = 12
    batch: int = 4
    dropout: float = 0.1
    dies_at: int = 0
    waits: bool = True
    signals_at: int = 0
    signals_rank: int = 0
    exits_at: int = 0
    form: str = ""
    patience: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a training gave.

    Attributes:
        first: Steps that were done before.
        losses: Of all steps, also those done before.
        digest: Of the final weights.
        code: With which it ended; 0 for one that was complete.
        best: The best checkpoint.
        said: Warnings.
        history: The logs.
        saved: Steps that were saved.
    """

    first: int
    losses: list[float]
    digest: str
    code: int
    best: str | None
    said: list[str]
    history: list[dict[str, float]]
    saved: list[int]


class Weighted(Trainer):  # type: ignore[misc]
    """A trainer with a loss and a step of its own, as TRL's are."""

    seen = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        return (0.5 * loss, outputs) if return_outputs else 0.5 * loss

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        self.seen += 1
        return super().training_step(*arguments, **options)


class Fate(TrainerCallback):  # type: ignore[misc]
    """Ends the process in the middle of a step, or asks it to end."""

    def __init__(self, plan: Plan, saving: Any) -> None:
        self._plan = plan
        self._saving = saving

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._plan.dies_at and state.global_step == self._plan.dies_at:
            if self._plan.waits:
                self._saving.collect(wait=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._plan.exits_at and state.global_step == self._plan.exits_at:
            sys.exit(4)
        own = args.process_index == self._plan.signals_rank
        if self._plan.signals_at and state.global_step == self._plan.signals_at and own:
            os.kill(os.getpid(), signal.SIGTERM)


def tiny(dropout: float) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32, attention_dropout=dropout,
        )
    )  # fmt: skip


def samples(count: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in tokens]


def trainer_of(plan: Plan, kind: type[Trainer] = Weighted) -> Trainer:
    model = tiny(plan.dropout)
    if plan.form:
        from outlast.tensorize import tensorize

        dense = sum(each.numel() for each in model.parameters())
        tensorize(model, form=plan.form, rank=0.5, match="*.mlp.*")
        assert sum(each.numel() for each in model.parameters()) < dense
    options = {
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2,
        "warmup_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, **plan.options,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=plan.output, max_steps=plan.steps, per_device_train_batch_size=plan.batch,
        **options,
    )  # fmt: skip
    return kind(model, arguments, train_dataset=samples(), eval_dataset=samples(8))


def digest_of(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, each in sorted(model.state_dict().items()):
        found.update(name.encode() + each.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(plan: Plan) -> Outcome:
    """Do what the plan says, in this process."""
    torch.set_num_threads(1)
    code = 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = trainer_of(plan)
        saving = _add(plan, trainer)
        kept.append(trainer)
        trainer.add_callback(Fate(plan, saving))
        if plan.patience:
            trainer.add_callback(EarlyStoppingCallback(plan.patience))
        resume = plan.resume
        if resume == "if any":
            resume = saving.has_checkpoint()
        try:
            trainer.train(resume_from_checkpoint=resume)
        except SystemExit as end:
            code = int(end.code or 0)
    history = trainer.state.log_history
    return Outcome(
        first=trainer._initial_global_step,
        losses=[each["loss"] for each in history if "loss" in each],
        digest=digest_of(trainer.model),
        code=code,
        best=trainer.state.best_model_checkpoint,
        said=[str(each.message) for each in said],
        history=history,
        saved=[] if saving is None else [each.step for each in saving.results],
    )


def _add(plan: Plan, trainer: Trainer) -> Any:
    saving = None
    if "outlast" in plan.add:
        saving = add_outlast(trainer, load_loop_job(None, [*QUIET, *plan.settings]))
    if "checkpoints" in plan.add:
        saving = add_checkpoints(trainer, writer="thread")
    if "stop" in plan.add:
        add_stop(trainer)
    if "guard" in plan.add:
        add_guard(trainer, "linear")
    if plan.fault:
        trainer.add_callback(_Faulty(plan.fault))
    return saving


class _Faulty(TrainerCallback):  # type: ignore[misc]
    """Injects a fault when the guard is there."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        from outlast.guard.inject import inject, parse_faults

        for model in (options["model"],):
            watch = model._outlast_watch
            guard = type("Held", (), {"watch": watch})
            inject(guard, parse_faults([self._fault]), rank=args.process_index)


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    return work(*arguments)


def alone(plan: Plan) -> Outcome | None:
    """Train in a process of its own; None when it has died."""
    found: Outcome | None = run_ranks(1, _alone, train, plan, may_die={0})[0]
    return found


def alone_with(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do `work` in a process of its own."""
    return run_ranks(1, _alone, work, *arguments)[0]


def together(ranks: int, plan: Plan) -> list[Outcome | None]:
    """Train on several ranks with DDP; None for those that have died."""
    return run_ranks(ranks, train, plan, may_die=set(range(ranks)))
