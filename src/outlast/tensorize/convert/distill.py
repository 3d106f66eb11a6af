"""Fitting structured layers to dense ones: second moments of inputs, starts, distillation.

Distillation, layer by layer: a structured layer learns to answer as a dense layer does.

Needed for layers with a nonlinearity in the middle, which no decomposition gives, and useful for
all others: it finds what matters for the inputs that really occur. Every layer is trained alone on

    |student(x) - teacher(x)|^2 / |teacher(x)|^2

for inputs x of the dense layer, by AdamW (Loshchilov and Hutter 2019) with steps relative to every
parameter's size (as in Adafactor, Shazeer and Stern 2018, section 8): factors that start from a
dense layer differ in size by orders of magnitude.

A layer with a nonlinearity in its middle starts such that it acts like a dense one
(`start_from_dense`).

``up act(down x)`` is no linear map, so no decomposition of a weight gives its factors. But for
z ~ N(0, s^2) any activation is a constant, a slope and a rest that is uncorrelated with both
(Bussgang 1952):

    act(z) = c + g z + rest,    c = E[act(z)],    g = E[z act(z)] / s^2.

With low-rank factors D, U of the weight, rows of D scaled by a_j so that each z_j has root mean
square s, ``down = diag(a) D`` and ``up = U diag(1 / (a g))`` give W x + c up 1 + up rest; the bias
takes up the constant. For SiLU, whose odd part is exactly z / 2 since
silu(z) = z / 2 + (z / 2) tanh(z / 2), g is 1/2 whatever s is, and the rest is about z^2 / 4: its
variance is s^2 / 2 of the signal's (to lowest order), so a small s makes the layer act as linear
as wanted, at the price of large entries in `up`, which learn slowly next to small ones in `down`.

In pairs of channels with opposite signs the even part cancels: silu(z) - silu(-z) = z, and the
same for GELU and ReLU. So a bottleneck of rank r holds any linear map of rank r / 2 exactly.

What to expect: the layer sees x through r linear channels only. For normal x the best function of
these is the linear one, so no training of a bottleneck can get below the error of the best matrix
of rank r on such inputs; for others it can, by what their dependence is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.convert.svd import low_rank, low_rank_for_inputs, working_copy


class InputMoments:
    """Collects E[x x^T] of the inputs of linear layers inside a ``with`` block.

    ::

        with InputMoments(model, match="*.mlp.*") as moments, torch.no_grad():
            for batch in batches:
                model(batch)
        factors = low_rank_for_inputs(layer.weight, moments[name], rank=64)

    Sums are float64 on the layer's device: 8 in^2 bytes a layer, 134 MB at 4096 features, or 8 in
    bytes with `diagonal`. Modules that read the same tensor are each counted.

    Args:
        model: The model whose `nn.Linear` layers are watched.
        match: Pattern or patterns of module names (as of a shell); any fitting one counts.
        diagonal: Collect E[x^2] of every feature only.

    Raises:
        TensorizeError: Where no linear layer has a matching name; and, from the model's forward,
            for inputs that are not finite.
    """

    def __init__(
        self, model: nn.Module, *, match: str | Sequence[str] = "*", diagonal: bool = False
    ) -> None:
        patterns = (match,) if isinstance(match, str) else tuple(match)
        self._layers: dict[str, nn.Linear] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not self._layers:
            raise TensorizeError(f"match = {match!r} fits the name of no nn.Linear in the model")
        self._diagonal = diagonal
        self._sums: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(self._layers, 0)
        self._handles: list[RemovableHandle] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers that are watched."""
        return tuple(self._layers)

    @property
    def tokens(self) -> Mapping[str, int]:
        """Rows that each layer has read so far."""
        return dict(self._tokens)

    def __getitem__(self, name: str) -> Tensor:
        """Second moment of a layer's input: (in, in), or (in,) where `diagonal`; float64.

        Raises:
            TensorizeError: For a layer that is not watched or has read nothing.
        """
        return self._sums[self._read(name)] / self._tokens[name]

    def mean(self, name: str) -> Tensor:
        """Mean of a layer's input: (in,) float64.

        Raises:
            TensorizeError: For a layer that is not watched or has read nothing.
        """
        return self._means[self._read(name)] / self._tokens[name]

    def _read(self, name: str) -> str:
        if name not in self._layers:
            raise TensorizeError(f"no inputs are collected of {name!r}: it does not fit `match`")
        if not self._tokens[name]:
            raise TensorizeError(
                f"{name!r} has read no input yet: run calibration batches inside the with block"
            )
        return name

    def __enter__(self) -> InputMoments:
        for name, layer in self._layers.items():
            self._handles.append(
                layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            self._add(name, (arguments[0] if arguments else named["input"]).detach())

        return add

    # Sums made in inference mode could not be added to outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _add(self, name: str, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if not rows.shape[0]:
            return
        wide = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)
        mean = wide.sum(0)
        if not bool(torch.isfinite(mean).all()):
            raise TensorizeError(f"an input of {name!r} is not finite: calibrate on a sound model")
        moment = wide.square().sum(0) if self._diagonal else wide.mT @ wide
        if name in self._sums:
            self._sums[name].add_(moment)
            self._means[name].add_(mean)
        else:
            self._sums[name], self._means[name] = moment, mean
        self._tokens[name] += rows.shape[0]


SIGNAL = 0.25
"""Root mean square before the activation: the rest is then 3 % of the variance for SiLU."""


class Bottleneck(Protocol):
    """Attributes of `outlast.tensorize.forms.low_rank.BottleneckLinear`."""

    down: nn.Linear
    up: nn.Linear
    activation: str


@dataclass(frozen=True, eq=False)
class BottleneckStart:
    """Factors to start from.

    Attributes:
        down: (rank, in).
        up: (out, rank).
        shift: (out,) to add to the dense layer's bias; it cancels the activation's mean.
    """

    down: Tensor
    up: Tensor
    shift: Tensor


def bottleneck_start(
    weight: Tensor,
    *,
    rank: int,
    activation: str = "silu",
    moment: Tensor | None = None,
    signal: float = SIGNAL,
    pairs: bool = False,
) -> BottleneckStart:
    """Factors with which ``up act(down x) + shift`` is about the best ``W' x`` of that rank.

    Args:
        weight: (out, in) of the dense layer.
        rank: Inner size.
        activation: A key of `outlast.tensorize.bottleneck.ACTIVATIONS`.
        moment: (in, in) or (in,) second moment of the inputs, see
            `outlast.tensorize.convert.svd`; None: independent inputs of variance 1.
        signal: Root mean square before the activation.
        pairs: Use channels in pairs of opposite signs: exact, but for rank / 2.

    Returns:
        The factors in the weight's type.

    Raises:
        TensorizeError: For an unknown activation, a rank or signal out of range, an odd rank with
            `pairs`, or a weight or moment that cannot be used.
    """
    if activation not in ACTIVATIONS:
        raise TensorizeError(f"activation = {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if not 0.0 < signal < math.inf:
        raise TensorizeError(f"signal = {signal} must be positive: 0.25 is usual")
    if pairs and rank % 2:
        raise TensorizeError(f"rank = {rank} must be even for channels in pairs")
    kept = rank // 2 if pairs else rank
    wide = working_copy(weight)
    found = (
        low_rank(wide, rank=kept)
        if moment is None
        else low_rank_for_inputs(wide, moment, rank=kept)
    )
    down, up = found.cores
    scale = signal / _root_mean_square(down, moment)
    mean, slope = linear_part(activation, signal)
    down, up = down * scale[:, None], up / (scale * slope)
    if pairs:
        # The mean cancels with the even part.
        down, up = torch.cat([down, -down]), torch.cat([up, -up], dim=1) / 2
    shift = -mean * up.sum(1)
    return BottleneckStart(*(part.to(weight.dtype).contiguous() for part in (down, up, shift)))


@torch.no_grad()
def start_from_dense(
    student: Bottleneck,
    teacher: nn.Linear,
    *,
    moment: Tensor | None = None,
    signal: float = SIGNAL,
    pairs: bool = False,
) -> None:
    """Fill a bottleneck layer in place with `bottleneck_start` of a dense layer.

    Without a bias in the student, the activation's mean stays in its output.

    Args:
        student: The layer to fill.
        teacher: The dense layer it shall stand for.
        moment: See `bottleneck_start`.
        signal: See there.
        pairs: See there.

    Raises:
        TensorizeError: See `bottleneck_start`; or the shapes differ, or the teacher has a bias and
            the student none.
    """
    rank = student.down.out_features
    wanted = (student.up.out_features, student.down.in_features)
    if tuple(teacher.weight.shape) != wanted:
        raise TensorizeError(
            f"the dense layer's weight has shape {tuple(teacher.weight.shape)}, but the layer that "
            f"is to replace it has {wanted}"
        )
    if teacher.bias is not None and student.up.bias is None:
        raise TensorizeError("the dense layer has a bias, so what replaces it needs bias = True")
    start = bottleneck_start(
        teacher.weight,
        rank=rank,
        activation=student.activation,
        moment=moment,
        signal=signal,
        pairs=pairs,
    )
    student.down.weight.copy_(start.down)
    student.up.weight.copy_(start.up)
    if student.up.bias is not None:
        bias = 0.0 if teacher.bias is None else teacher.bias
        student.up.bias.copy_(start.shift + bias)


def linear_part(activation: str, signal: float) -> tuple[float, float]:
    """Mean and slope c, g of an activation for z ~ N(0, signal^2), by the trapezoidal rule.

    Raises:
        TensorizeError: For an activation without a linear part.
    """
    step = 1e-3
    points = torch.arange(-10_000, 10_001, dtype=torch.float64) * step
    density = torch.exp(-points.square() / 2.0) * (step / math.sqrt(2.0 * math.pi))
    values = ACTIVATIONS[activation](signal * points)
    mean = float((values * density).sum())
    slope = float((values * points * density).sum()) / signal
    if abs(slope) < 1e-6:
        raise TensorizeError(f"activation = {activation!r} has no linear part to start from")
    return mean, slope


def _root_mean_square(down: Tensor, moment: Tensor | None) -> Tensor:
    """sqrt(E z_j^2) of z = down x, 1 where it is zero."""
    if moment is None:
        squares = down.square().sum(1)
    else:
        wide = moment.to(down)
        weighted = down * wide if wide.dim() == 1 else down @ wide
        squares = (weighted * down).sum(1)
    return torch.where(squares > 0, squares, torch.ones_like(squares)).sqrt()


LearningRate = float | Callable[[int], float]
"""A constant, or a function of the step, counted from 0. It is the share of a parameter's root mean
square at the start that AdamW moves it by in a step."""

_SMALLEST = 1e-3
"""Root mean square that parameters are taken to have at least: biases may start at zero."""


def cosine(peak: float, steps: int, *, warmup: int = 0) -> Callable[[int], float]:
    """A learning rate that rises linearly for `warmup` steps and falls to 0 as a cosine."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        share = (step - warmup) / max(1, steps - warmup)
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))

    return rate


def distill(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Tensor],
    *,
    learning_rate: LearningRate = 1e-2,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[float, ...]:
    """Train one layer to answer as another.

    Args:
        student: Layer to train, in place; half-precision parameters are float32 meanwhile.
        teacher: Layer to imitate; not changed.
        batches: Inputs (..., in_features), one step each: calibration data.
        learning_rate: Of AdamW, relative to the parameters, see `LearningRate` and `cosine`.
        on_step: Called with the step and the relative error before it.

    Returns:
        ``|student(x) - teacher(x)| / |teacher(x)|`` of every batch, before its step.

    Raises:
        TensorizeError: Where errors stop being finite.
    """
    errors: list[float] = []
    with _widened(student):
        trainer = _Trainer(student, learning_rate)
        for batch in batches:
            with torch.no_grad():
                wanted = teacher(batch)
            error = trainer.step("the layer", batch, wanted)
            if error is None:
                continue
            errors.append(error)
            if on_step is not None:
                on_step(len(errors) - 1, error)
    return tuple(errors)


def distill_model(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    learning_rate: LearningRate = 1e-2,
    on_batch: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Train every structured layer of a model on the inputs of the dense layer of the same name.

    One forward of the teacher per batch; each layer takes its step in a hook on its dense
    counterpart, so the activations of one layer at a time are held. All layers learn from the
    inputs that the *teacher* gives them, so their order does not matter and errors do not add up.

    Args:
        student: Model in which layers were replaced; only these are trained, in place.
        teacher: The model with the dense layers (`nn.Linear`), run in evaluation mode.
        batches: Arguments of the teacher's forward: a mapping (keywords), a tuple or list
            (positions), or one tensor.
        learning_rate: As in `distill`.
        on_batch: Called with the number of the batch and every layer's relative error before its
            step.

    Returns:
        The relative errors of `distill`, by the layer's name.

    Raises:
        TensorizeError: Where no layer was replaced, or errors stop being finite.
    """
    replaced = replaced_layers(student, teacher)
    if not replaced:
        raise TensorizeError(
            "no nn.Linear of the teacher has another layer in its place in the student: "
            "replace some with outlast.tensorize.tensorize first"
        )
    errors: dict[str, list[float]] = {name: [] for name in replaced}
    latest: dict[str, float] = {}
    training = teacher.training
    handles = []
    with _widened(*(layer for _, layer in replaced.values())):
        try:
            teacher.eval()
            for name, (dense, layer) in replaced.items():
                trainer = _Trainer(layer, learning_rate)
                handles.append(
                    dense.register_forward_hook(_step_of(name, trainer, latest), with_kwargs=True)
                )
            for number, batch in enumerate(batches):
                latest.clear()
                with torch.no_grad():
                    if isinstance(batch, Mapping):
                        teacher(**batch)
                    elif isinstance(batch, Sequence):
                        teacher(*batch)
                    else:
                        teacher(batch)
                for name, error in latest.items():
                    errors[name].append(error)
                if on_batch is not None:
                    on_batch(number, dict(latest))
        finally:
            for handle in handles:
                handle.remove()
            teacher.train(training)
    return {name: tuple(values) for name, values in errors.items()}


def replaced_layers(
    student: nn.Module, teacher: nn.Module
) -> dict[str, tuple[nn.Linear, nn.Module]]:
    """Dense layers of the teacher whose place another kind of module has in the student."""
    layers = dict(student.named_modules())
    return {
        name: (module, layers[name])
        for name, module in teacher.named_modules()
        if isinstance(module, nn.Linear)
        and name in layers
        and not isinstance(layers[name], nn.Linear)
    }


class _Trainer:
    """AdamW on one layer."""

    def __init__(self, student: nn.Module, learning_rate: LearningRate) -> None:
        self._student = student
        self._rate = learning_rate
        self._steps = 0
        trained = [one for one in student.parameters() if one.requires_grad]
        if not trained:
            raise TensorizeError(
                f"{type(student).__name__} has no parameter that requires a gradient: "
                f"unfreeze it for distillation"
            )
        self._sizes = [
            max(float(one.detach().square().mean().sqrt()), _SMALLEST) for one in trained
        ]
        groups = [{"params": [one]} for one in trained]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
        self._dtype = trained[0].dtype

    def _now(self) -> float:
        return self._rate(self._steps) if callable(self._rate) else self._rate

    def step(self, name: str, inputs: Tensor, wanted: Tensor) -> float | None:
        """One step; the relative error before it, or None where there is nothing to learn from."""
        target = wanted.detach().to(self._dtype)
        scale = float(target.square().sum())
        if scale == 0.0:
            return None
        with torch.enable_grad(), torch.autocast(inputs.device.type, enabled=False):
            loss = (self._student(inputs.detach().to(self._dtype)) - target).square().sum() / scale
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TensorizeError(
                    f"distillation of {name} is not finite at step {self._steps}: "
                    f"lower learning_rate = {self._now()} or check the inputs"
                )
            for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
                group["lr"] = self._now() * size
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return math.sqrt(value)


def _step_of(name: str, trainer: _Trainer, latest: dict[str, float]) -> Any:
    def hook(
        module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        error = trainer.step(name, arguments[0] if arguments else named["input"], output)
        if error is not None:
            latest[name] = error

    return hook


@contextmanager
def _widened(*modules: nn.Module) -> Iterator[None]:
    """Half-precision parameters are float32 inside: AdamW's steps are lost to their rounding."""
    narrow = {
        parameter: parameter.dtype
        for module in modules
        for parameter in module.parameters()
        if parameter.dtype in (torch.bfloat16, torch.float16)
    }
    for parameter in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in narrow.items():
            parameter.data = parameter.data.to(dtype)
