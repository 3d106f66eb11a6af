"""Pipeline parallelism: a Hugging Face decoder cut into stages, without touching its forward.

Blocks that live elsewhere are replaced by `Elsewhere`, which hands its input on and has no
parameters; a stage that is not the first takes hidden states as ``inputs_embeds``; the final norm
and head of a stage that is not the last hand on, too. Parameter names stay those of the whole
model, so a checkpoint fits any number of stages.

Only runs with a pipeline import this module: torch's pipelining loads its compiler, half a second
that other layouts need not spend.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from outlast.errors import OutlastError
from outlast.guard.forward_patch import suspended_checks
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.train.dropout import DropoutStream
from outlast.train.engine import loss_sum, tensors
from outlast.train.gradients import average_over
from outlast.train.model import Elsewhere, held_blocks, logits_of
from outlast.train.parallelize import recompute_activations
from outlast.train.preflight import pipeline_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    from outlast.data import MicroBatch
    from outlast.train.build import SetUp


def pipeline_engine(setup: SetUp, model: nn.Module, mesh: DeviceMesh) -> PipelineEngine:
    """Cut the model into this rank's stages, each replicated over the data ranks."""
    job, layout, device = setup.job, setup.plan.layout, setup.device
    stages, microbatches = pipeline_shape(job, layout)
    rank = layout.pipeline_rank(setup.ranks.rank)
    # Interleaving gives every rank each pipeline-th stage.
    mine = range(rank, stages, layout.pipeline)
    blocks = stage_blocks(setup.plan.facts.layers or 0, stages)
    local = {block for index in mine for block in blocks[index]}
    keep_local(model, local, first=0 in mine, last=stages - 1 in mine)
    model.to(device)
    dropout = DropoutStream(job.run.seed, held_blocks(model))
    if job.train.activation_checkpointing:
        recompute_activations(model, dropout)
    modules = {}
    for index in mine:
        first, last = index == 0, index == stages - 1
        view = stage_view(model, blocks[index], first=first, last=last)
        bf16 = torch.bfloat16 if job.train.precision == "bf16" else None
        modules[index] = StageModule(view, first=first, last=last, dropout=dropout, autocast=bf16)
    loss_scale = [1.0]
    schedule = make_schedule(
        modules,
        stages,
        microbatches,
        mesh["pipeline"].get_group(),
        lambda logits, targets: loss_sum(logits, targets) * loss_scale[0],
    )
    replicas = mesh["replicate"].get_group()
    return PipelineEngine(schedule, [*modules.values()], device, replicas, loss_scale, setup.mark)


@dataclass
class PipelineEngine:
    """Every rank runs its stages; micro-batches flow through `schedule`.

    Args:
        loss_scale: One number by which the schedule's loss function multiplies; set before each
            run, because a schedule takes its loss function once.
        replicas: Ranks that hold the same stages and see other samples.
        mark: Told of the passes, which are one phase since they overlap, and of the reduction.
    """

    schedule: _PipelineSchedule
    stages: list[StageModule]
    device: torch.device
    replicas: ProcessGroup
    loss_scale: list[float]
    mark: EnterPhase = ignore_phase

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """See `Engine`; on ranks without the last stage the returned share is 0."""
        for stage in self.stages:
            stage.step = step
        replicas = self.replicas.size()
        self.loss_scale[0] = replicas / global_tokens
        self.mark("forward")
        loss = self._run(batches, training=True)
        if replicas > 1:
            self.mark("reduce")
            for stage in self.stages:
                average_over(stage.parameters(), self.replicas)
        return loss / replicas

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """See `Engine`; on ranks without the last stage the returned sum is 0."""
        self.loss_scale[0] = 1.0
        with torch.no_grad():
            return self._run([batch], training=False)

    def _run(self, batches: Sequence[MicroBatch], *, training: bool) -> torch.Tensor:
        parts = [tensors(batch, self.device) for batch in batches]
        inputs, targets, sample_ids = (torch.cat(item) for item in zip(*parts, strict=True))
        first = (inputs,) if any(stage.first for stage in self.stages) else ()
        is_last = any(stage.last for stage in self.stages)
        losses: list[torch.Tensor] = []
        run = self.schedule.step if training else self.schedule.eval
        run(
            *first,
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
            sample_ids=sample_ids,
        )
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


class StageModule(nn.Module):
    """One stage: token ids or hidden states in, hidden states or logits out.

    Args:
        model: A copy of the whole model in which blocks of other stages are `Elsewhere`.
        first: Whether it takes token ids.
        last: Whether it gives logits.
        dropout: The run's dropout stream.
        autocast: Type of matrix products, or None for the parameters' own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        first: bool,
        last: bool,
        dropout: DropoutStream,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.first, self.last = first, last
        self._autocast = autocast
        self._dropout = dropout
        self.step = 0

    def forward(self, inputs: torch.Tensor, sample_ids: torch.Tensor) -> torch.Tensor:
        """Run this stage on one micro-batch.

        Args:
            inputs: Token ids (batch, sequence), or hidden states (batch, sequence, width).
            sample_ids: (batch,) global sample indices.
        """
        given = {"input_ids": inputs} if self.first else {"inputs_embeds": inputs}
        masks = (
            self._dropout.for_samples(self.step, sample_ids)
            if self.training
            else contextlib.nullcontext()
        )
        precision = torch.autocast(
            inputs.device.type, self._autocast, enabled=self._autocast is not None
        )
        with masks, precision:
            return logits_of(self.model(**given)).float()


def _parts_of(model: nn.Module) -> list[str]:
    """Find what a pipeline stage needs in a decoder, by the model's own ``pp_plan``.

    Returns:
        Names of the modules: the embedding, the layers, the last norm and the head.

    Raises:
        OutlastError: When the model has no such plan or ties its embeddings.
    """
    plan: dict[str, Any] = getattr(model, "pp_plan", None) or {}
    names = list(plan)
    by_ending = {name.rpartition(".")[2]: name for name in names}
    wanted = ("embed_tokens", "layers", "norm", "lm_head")
    try:
        return [by_ending[name] for name in wanted]
    except KeyError:
        raise OutlastError(
            "parallel.pipeline > 1 needs a decoder whose pp_plan names embed_tokens, layers, norm "
            f"and lm_head, and that of {type(model).__name__} names {names or 'nothing'}; "
            "use parallel.shard instead"
        ) from None


def stage_blocks(layers: int, stages: int) -> list[range]:
    """Blocks of each stage: contiguous and as even as possible, larger ones first.

    Raises:
        OutlastError: When there are fewer layers than stages.
    """
    if layers < stages:
        raise OutlastError(
            f"the pipeline has {stages} stages (parallel.pipeline x "
            f"parallel.pipeline_stages_per_rank), but the model has only {layers} layers; "
            "use fewer stages"
        )
    whole, extra = divmod(layers, stages)
    starts = [index * whole + min(index, extra) for index in range(stages + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(stages)]


def keep_local(model: nn.Module, local: set[int], *, first: bool, last: bool) -> None:
    """Replace everything of `model` that this rank does not hold by `Elsewhere`.

    Args:
        model: The whole model.
        local: Indices of the blocks that this rank holds.
        first: Whether it holds the embedding.
        last: Whether it holds the final norm and the head.
    """
    embedding, name, *ends = _parts_of(model)
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    for index in range(len(layers)):
        if index not in local:
            layers[index] = Elsewhere()
    for absent in (*(() if first else (embedding,)), *(() if last else ends)):
        model.set_submodule(absent, Elsewhere())


def stage_view(model: nn.Module, blocks: range, *, first: bool, last: bool) -> nn.Module:
    """A shallow copy of `model` that runs only `blocks`, sharing all modules with it.

    The same parameters, names and hooks; what this stage has not is `Elsewhere`.
    """
    embedding, layers_name, *ends = _parts_of(model)
    view = _shallow(model)
    holder, _, name = layers_name.rpartition(".")
    if holder:
        view.set_submodule(holder, _shallow(model.get_submodule(holder)))
    layers = model.get_submodule(layers_name)
    assert isinstance(layers, nn.ModuleList)
    kept = [block if index in blocks else Elsewhere() for index, block in enumerate(layers)]
    setattr(view.get_submodule(holder), name, nn.ModuleList(kept))
    for absent in (*(() if first else (embedding,)), *(() if last else ends)):
        view.set_submodule(absent, Elsewhere())
    return view


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of `module` itself with its own table of the same submodules."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class _Stage(PipelineStage):
    """A stage that learns its shapes from memory that nobody has written to, unseen by a guard."""

    def _forward_metadata_inference(self, *arguments: Any, **options: Any) -> Any:
        with suspended_checks(self.submod):
            return super()._forward_metadata_inference(*arguments, **options)

    def _backward_metadata_inference(self, *arguments: Any, **options: Any) -> Any:
        with suspended_checks(self.submod):
            return super()._backward_metadata_inference(*arguments, **options)


def make_schedule(
    modules: Mapping[int, StageModule],
    stages: int,
    microbatches: int,
    group: ProcessGroup,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> _PipelineSchedule:
    """1F1B for one stage per rank, interleaved 1F1B for several; gradients are not rescaled.

    Args:
        modules: This rank's stages by their index.
        stages: Of all ranks.
        microbatches: In flight.
        group: Of the pipeline's ranks.
        loss: Of logits and targets.
    """
    # Shapes are learnt from the first micro-batch.
    mine = [
        _Stage(module, index, stages, next(module.parameters()).device, group=group)
        for index, module in modules.items()
    ]
    if len(mine) == 1:
        return Schedule1F1B(mine[0], microbatches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B([*mine], microbatches, loss_fn=loss, scale_grads=False)
