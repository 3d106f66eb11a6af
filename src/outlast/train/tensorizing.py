"""Tensorized layers of a run: from [tensorize] to a model, rules of its training, its records."""

from __future__ import annotations

import glob
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outlast.distributed.group import raise_together
from outlast.errors import OutlastError
from outlast.job.checks import NO_MATRICES
from outlast.records import Tensorized, Warned
from outlast.tensorize.export import export_dense, export_factored
from outlast.tensorize.measure import calibrate, tune_model, warm_model
from outlast.tensorize.optimizers import ProductDecay, SpectralBound, factor_unfoldings
from outlast.tensorize.parameters import factor_multipliers, mup_initialize_, structured_layers
from outlast.tensorize.planner import forget
from outlast.tensorize.replace import tensorize
from outlast.tensorize.shapes import MULTIPLE_OF_PRECISION
from outlast.tensorize.spikes import SpikeDetector
from outlast.train.model import build_model, products_per_token, size_of, wants_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.distributed.ranks import Ranks
    from outlast.job import Job, OptimizerSection, TensorizeSection
    from outlast.tensorize.optimizers import Unfolding
    from outlast.tensorize.parameters import StructuredPart
    from outlast.tensorize.replace import Replacement, Replacements
    from outlast.train.layout import Layout
    from outlast.train.model import ModelSize

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
_SLOW = 0.95
"""Predicted speed over the dense layer's from which on a layer is called slow."""

_OWN_STREAM = 0x7E4502
"""Added to run.seed, so that factors are not drawn with the numbers of the dense weights."""


def build_whole_model(
    job: Job, *, drawn: bool = True, collective: bool = True
) -> tuple[nn.Module, Tensorized | None]:
    """The job's model on the CPU, tensorized if it says so; its weights depend on run.seed alone.

    Args:
        job: Checked.
        drawn: As for `build_model`; layers that are made of others' weights are always drawn.
        collective: Whether all ranks build it, and are compared in what becomes of each layer.

    Returns:
        The model, and what was replaced in it; None without [tensorize].

    Raises:
        OutlastError: When the model cannot be built, or nothing fits tensorize.match.
    """
    settings = job.tensorize
    if settings.form == "off":
        return build_model(job, drawn=drawn), None
    model = build_model(job)
    dense = size_of(model, job.data.sequence_length)
    found = _replace(model, job, collective=collective)
    kept = (
        {}
        if settings.force
        else {
            row.name: f"{row.form} at rank {row.rank} has {row.parameters} parameters, "
            f"dense {row.dense_parameters}"
            for row in found
            if row.parameters >= row.dense_parameters > 0
        }
    )
    if kept:
        if len(kept) == len(found):
            raise OutlastError(
                f"tensorize.rank = {settings.rank} leaves no layer with fewer parameters than it "
                f"has, e.g. {next(iter(kept))}: {next(iter(kept.values()))}; choose a smaller "
                "rank, or set tensorize.force = true"
            )
        model = build_model(job)
        found = _replace(model, job, kept, collective=collective)
    if settings.mup:
        mup_initialize_(model)
    size = size_of(model, job.data.sequence_length)
    return model, _event(job.tensorize, model, found, kept, dense=dense, size=size)


def _replace(
    model: nn.Module, job: Job, kept: Iterable[str] = (), *, collective: bool
) -> Replacements:
    """Replace layers in place, all but `kept`."""
    settings = job.tensorize
    torch.manual_seed(job.run.seed + _OWN_STREAM)
    excluded = [*settings.exclude, *(glob.escape(name) for name in kept)]
    with warnings.catch_warnings():
        # `slow_layers` says it in the records of the run.
        warnings.filterwarnings("ignore", message=".* slower than dense ones")
        return tensorize(
            model,
            form=settings.form,
            rank=settings.rank,
            match=settings.match or "*",
            exclude=excluded or None,
            activation=settings.activation if settings.form == "cola" else None,
            cores=settings.cores or None,
            init="from_dense" if starts_from_dense(job) else "scratch",
            # What is predicted to be slower differs between machines, and the model must not.
            force=True,
            multiple=MULTIPLE_OF_PRECISION[PRECISIONS[job.train.precision]],
            collective=collective,
        )


def starts_from_dense(job: Job) -> bool:
    """Return whether factors begin as those nearest to weights that were loaded."""
    settings = job.tensorize
    if settings.form == "off" or settings.initialize != "auto":
        return settings.initialize == "from_dense" and settings.form != "off"
    return not job.model.module and settings.form not in NO_MATRICES and wants_weights(job.model)


def _event(
    settings: TensorizeSection,
    model: nn.Module,
    found: Replacements,
    kept: dict[str, str],
    *,
    dense: ModelSize,
    size: ModelSize,
) -> Tensorized:
    rows = {row.name: row for row in found}
    modules = [_module(layer, rows[layer.name]) for layer in structured_layers(model)]
    return Tensorized(
        form=settings.form,
        wanted_rank=str(settings.rank),
        modules=modules,
        kept=kept,
        parameters=size.parameters,
        dense_parameters=dense.parameters,
        flops_per_token=size.flops_per_token,
        dense_flops_per_token=dense.flops_per_token,
        left={
            row.name: f"{row.why} ({found.share_of(row.parameters):.1%} of the parameters)"
            for row in found.kept
            if row.name not in kept
        },
    )


def _module(layer: StructuredPart, row: Replacement) -> dict[str, Any]:
    """One replaced layer, as the event lists it."""
    network = layer.network
    return {
        "name": layer.name,
        "form": row.form,
        "rank": str(row.rank),
        "in_features": network.in_features,
        "out_features": network.out_features,
        "parameters": row.parameters,
        "dense_parameters": row.dense_parameters,
        "flops": 2 * products_per_token(layer),
        "dense_flops": round(row.dense_flops_per_token),
        "predicted_speed": row.speed,
    }


def calibrate_planner(job: Job, ranks: Ranks, device: torch.device) -> None:
    """Measure this machine's operations where the job asks for it; all ranks call it together.

    One process per machine measures, with the others idle, and leaves a file for them.
    """
    if job.tensorize.form == "off" or not job.tensorize.calibrate:
        return
    dtype = _activations(job)
    raise_together(lambda: calibrate(dtype, device) if ranks.local_rank == 0 else None)
    raise_together(lambda: calibrate(dtype, device))


def tune_layers(model: nn.Module, setup: tuple[Job, Layout, Ranks, torch.device]) -> None:
    """Time the best few plans of every layer where the job asks for it; all ranks call it together.

    On CUDA this also tunes the fused kernels, on every rank: they are proposed afterwards only.
    """
    job, layout, ranks, device = setup
    if job.tensorize.form == "off" or not job.tensorize.calibrate:
        return
    share = -(-job.train.batch_size // layout.data_ranks)
    samples = min(share, job.train.micro_batch_size or share)
    tokens = samples * job.data.sequence_length
    dtype = _activations(job)
    raise_together(
        lambda: tune_model(model.to(device), tokens, dtype=dtype) if ranks.local_rank == 0 else None
    )
    model.cpu()
    forget()
    raise_together(lambda: warm_model(model, tokens, dtype=dtype, device=device))


def _activations(job: Job) -> torch.dtype:
    return torch.bfloat16 if job.train.precision == "bf16" else torch.float32


def slow_layers(event: Tensorized) -> Warned | None:
    """A warning of layers that the planner predicts to be slower than dense on this machine."""
    slow = [module for module in event.modules if (module["predicted_speed"] or 1.0) < _SLOW]
    if not slow:
        return None
    worst = min(slow, key=lambda name: float(name["predicted_speed"]))
    return Warned(
        f"{len(slow)} of {len(event.modules)} {event.form} layers are predicted to be slower than "
        f"dense ones on this machine, {worst['name']} by {1 / worst['predicted_speed']:.2f}x; "
        "tensorize.exclude keeps layers dense"
    )


@dataclass(frozen=True)
class FactorRules:
    """Knowledge of factors that an optimizer needs.

    Attributes:
        multipliers: Factor -> its rate over that of the other parameters (muP).
        unfoldings: Factor that is no matrix between features -> how it becomes some, for Muon.
        looked_up: Identities of the factors of embeddings: not for Muon.
        decayed_elsewhere: Identities of factors whose product is decayed instead.
    """

    multipliers: Mapping[Tensor, float]
    unfoldings: Mapping[Tensor, Unfolding]
    looked_up: frozenset[int]
    decayed_elsewhere: frozenset[int]


def factor_rules(model: nn.Module, settings: TensorizeSection) -> FactorRules:
    """The rules of [tensorize] for the factors of `model`, after it was made parallel."""
    layers = list(structured_layers(model))
    matrices = {
        id(parameter) for layer in layers if layer.is_two_factor for parameter in layer.parameters
    }
    everything = frozenset(id(parameter) for layer in layers for parameter in layer.parameters)
    return FactorRules(
        multipliers=factor_multipliers(model) if settings.mup else {},
        unfoldings={
            factor: unfolding
            for factor, unfolding in factor_unfoldings(model).items()
            if id(factor) not in matrices
        },
        looked_up=frozenset(
            id(parameter) for layer in layers if layer.looks_up for parameter in layer.parameters
        ),
        decayed_elsewhere=everything if settings.product_weight_decay else frozenset(),
    )


def add_update_rules(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    settings: TensorizeSection,
    optimizer_settings: OptimizerSection,
) -> None:
    """Decay of products and bounds on their steps, as hooks of the optimizers that train them.

    A rank that holds no structured layer, as in a pipeline, gets none.
    """
    if settings.form == "off":
        return
    layers = list(structured_layers(model))
    for optimizer in optimizers:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [
            layer
            for layer in layers
            if any(id(parameter) in held for parameter in layer.parameters)
        ]
        if settings.product_weight_decay and trained:
            ProductDecay(optimizer, model, optimizer_settings.weight_decay)
        if settings.spectral_limit and any(layer.is_two_factor for layer in trained):
            SpectralBound(optimizer, model, settings.spectral_limit)


class SpikeWatch:
    """Warns of spikes of the training loss."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._detector = SpikeDetector()

    def observe(self, step: int, loss: float) -> Warned | None:
        """Take a step's loss; a warning if it makes a spike certain.

        Args:
            step: Steps done with it; each call's is one more than that of the one before.
            loss: Nats per token.
        """
        self._first = step if self._first is None else self._first
        spike = self._detector.observe(loss)
        if spike is None:
            return None
        step = self._first + spike.step
        if spike.kind == "not finite":
            return Warned(f"the loss of step {step} is {loss}; it was {spike.usual:.4g} before")
        return Warned(
            f"the loss has jumped at step {step}, to {loss:.4g} from {spike.usual:.4g} "
            f"({spike.deviations:.0f} deviations); tensorize.spectral_limit bounds the steps of "
            "two factors, and a lower learning rate those of all forms"
        )


def save_model(model: nn.Module, folder: Path, settings: TensorizeSection) -> None:
    """Write a trained Hugging Face model to a new folder.

    Structured layers become dense ones of equal weight, so that ``from_pretrained`` loads them
    anywhere. Where some are no matrices, the factors are written as they are.
    """
    if settings.form in NO_MATRICES:
        export_factored(model, folder)
    else:
        export_dense(model, folder)


def export_note(settings: TensorizeSection) -> str | None:
    """Return a note on an exported model, in one sentence."""
    if settings.form not in NO_MATRICES:
        return None
    return (
        f"layers of tensorize.form = {settings.form!r} are no matrices, so the exported folder "
        "holds their factors: load it by outlast.tensorize.load_factored, or by from_pretrained "
        "with trust_remote_code=True"
    )
