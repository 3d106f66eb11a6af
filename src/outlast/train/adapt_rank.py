"""Ranks of tensorized layers that follow the training of a run: tensorize.adapt_rank.

Every few steps all ranks of the run look at the singular values of its layers' weights. Where a
rank is to change, the model is gathered on the first rank, changed there with its optimizers'
moments, and made parallel again, see `outlast.tensorize.ranks.change_sharded`. That is done before
the state of the step is kept or saved. Whoever restores such a state gives the model its ranks
first, by the shapes that were saved.
"""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.distributed.group import gather_objects
from outlast.errors import TensorizeError
from outlast.records import RanksChanged
from outlast.state.live import FittingState, module_tensors
from outlast.tensorize.parameters import structured_layers
from outlast.tensorize.ranks import (
    RankRule,
    adapt,
    change_sharded,
    changes_ranks,
    match_ranks,
)
from outlast.tensorize.shapes import FORMS, MULTIPLE_OF_PRECISION
from outlast.train.engine import ReplicaEngine
from outlast.train.model import size_of
from outlast.train.optimizer import build_optimizers
from outlast.train.parallelize import replica_engine
from outlast.train.tensorizing import PRECISIONS, add_update_rules, factor_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from outlast.job import Job
    from outlast.runtime.watching import CommunicationWait
    from outlast.state.live import State
    from outlast.train.build import SetUp
    from outlast.train.loop import Trainer

Shape = tuple[int, ...]
Errors = dict[tuple[str, str], float | None]

_OWN_STREAM = 0xADA9
"""Added to run.seed and the step, for the entries of factors that grow."""


def rule_of(job: Job) -> RankRule:
    """The rule of [tensorize] for the next rank of every bond."""
    settings = job.tensorize
    aligned = FORMS[settings.form].aligned
    return RankRule(
        settings.adapt_energy,
        None if settings.largest_rank == 0 else 1.5,
        minimum=settings.smallest_rank,
        maximum=settings.largest_rank or None,
        multiple=MULTIPLE_OF_PRECISION[PRECISIONS[job.train.precision]] if aligned else 1,
    )


def fit_ranks(model: nn.Module, shapes: Mapping[str, Shape]) -> list[str]:
    """Give a model that is not parallel the ranks of a saved state.

    Args:
        model: Changed in place.
        shapes: Of the state's tensors, by name.

    Returns:
        The names of the layers that were changed; none where the state does not fit for other
        reasons, which whoever reads it says.
    """
    saved = {
        name.removeprefix("model."): torch.empty(shape, device="meta")
        for name, shape in shapes.items()
        if name.startswith("model.")
    }
    try:
        return match_ranks(model, saved)
    except TensorizeError:
        return []


class RankAdaptation:
    """Changes the ranks of a run's model between two steps, and when a state is restored.

    Args:
        setup: Of this rank.
        model: Whole, before it is made parallel.
        mesh: Of the run; None with one process.
        waits: Told of the model's gradients.

    Attributes:
        trainer: The one that trains the model; to be set before a step or a restore.
    """

    trainer: Trainer

    def __init__(
        self, setup: SetUp, model: nn.Module, mesh: DeviceMesh | None, waits: CommunicationWait
    ) -> None:
        self._setup, self._mesh, self._waits = setup, mesh, waits
        self._rule = rule_of(setup.job)
        # The model without memory for its parameters, of the ranks of the live one.
        memo = {
            id(parameter): nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            for parameter in model.parameters()
        }
        self._skeleton: nn.Module = copy.deepcopy(model, memo)
        self._recorded = _ranks_of(self._skeleton)

    def after_step(self, step: int) -> float:
        """Adapt the ranks where that is due; all ranks call this together.

        Args:
            step: Steps done.

        Returns:
            The seconds that it took.

        Raises:
            DataCorruptionError: When weights or moments have changed in memory since the step.
        """
        job, trainer = self._setup.job, self.trainer
        if step % job.tensorize.adapt_every_steps or step >= job.train.steps:
            return 0.0
        begun = time.perf_counter()
        runtime = trainer.runtime
        runtime.mark("heal", step)
        runtime.check_state(last=True)
        if not gather_objects(changes_ranks(trainer.model, self._rule))[0]:
            return time.perf_counter() - begun
        generator = torch.Generator().manual_seed(job.run.seed + _OWN_STREAM + step)
        errors: Errors = {}

        def change(whole: nn.Module, own: list[Optimizer]) -> None:
            for found in adapt(whole, self._rule, own, generator=generator):
                # Of a layer with a nonlinearity in the middle the error is not known.
                known = math.isfinite(found.error)
                errors[found.name, found.bond] = found.error if known else None

        model, optimizers = change_sharded(
            trainer.model,
            trainer.optimizers,
            change,
            build=self._instance,
            shard=self._parallelized,
            plain=self._optimizers,
        )
        fit_ranks(
            self._skeleton, {f"model.{name}": part.shape for name, part in module_tensors(model)}
        )
        self._exchange(model, optimizers)
        if runtime.guard is not None:
            runtime.guard.restart(step)
        seconds = time.perf_counter() - begun
        self._record(step, seconds, errors)
        return seconds

    def restored(self, step: int) -> None:
        """Record the ranks of the state that was restored, where they are not those of the job."""
        self._record(step, 0.0, {})

    def fit(self, shapes: Mapping[str, Shape]) -> None:
        """Give the live model the ranks of a state that is about to be read into it."""
        if fit_ranks(self._skeleton, shapes):
            model = self._instance()
            self._exchange(model, self._parallelized(model))

    def _instance(self) -> nn.Module:
        """A whole model of the present ranks on the CPU, whose parameters are zeros."""
        memo = {
            id(parameter): nn.Parameter(
                torch.zeros_like(parameter, device="cpu"), parameter.requires_grad
            )
            for parameter in self._skeleton.parameters()
        }
        return copy.deepcopy(self._skeleton, memo)

    def _optimizers(self, model: nn.Module) -> list[Optimizer]:
        job = self._setup.job
        return build_optimizers(model, job.optimizer, factor_rules(model, job.tensorize))

    def _parallelized(self, model: nn.Module) -> list[Optimizer]:
        """Make a whole model parallel, as when the run began, and give its optimizers."""
        self._engine = replica_engine(self._setup, model, self._mesh, self._waits, saved=True)
        return self._optimizers(model)

    def _exchange(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Put another model in the place of the one that was trained so far."""
        job, trainer = self._setup.job, self.trainer
        add_update_rules(model, optimizers, job.tensorize, job.optimizer)
        if isinstance(trainer.engine, ReplicaEngine):
            self._engine.audit = trainer.engine.audit
        trainer.model, trainer.optimizers, trainer.engine = model, optimizers, self._engine
        saves: Any = trainer.runtime.saves
        saves.state.update(model=model, optimizer=optimizers)
        if trainer.guard is not None:
            trainer.guard.follow(self._engine.model, optimizers)

    def _record(self, step: int, seconds: float, errors: Errors) -> None:
        """Write down how the ranks differ from those that were recorded last."""
        before, self._recorded = self._recorded, _ranks_of(self._skeleton)
        changes: list[dict[str, Any]] = [
            {"name": name, "bond": bond, "before": before[name, bond], "after": rank}
            | {"error": errors.get((name, bond))}
            for (name, bond), rank in self._recorded.items()
            if rank != before[name, bond]
        ]
        if changes:
            size = size_of(self._skeleton, self._setup.job.data.sequence_length)
            self.trainer.runtime.write(
                RanksChanged(step, changes, size.parameters, size.flops_per_token, seconds)
            )


def run_state(
    model: nn.Module, optimizers: list[Optimizer], adaptation: RankAdaptation | None
) -> State:
    """The state that is kept and saved; its model takes on the ranks of what is read into it."""
    state = {"model": model, "optimizer": optimizers}
    return state if adaptation is None else FittingState(state, adaptation.fit)


def _ranks_of(model: nn.Module) -> dict[tuple[str, str], int]:
    """The rank of every bond, by the name of its layer and its letter."""
    return {
        (layer.name, bond): layer.network.size(bond)
        for layer in structured_layers(model)
        for bond in layer.network.bonds
    }
