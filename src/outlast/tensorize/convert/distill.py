"""Distillation, layer by layer: a structured layer learns to answer as a dense layer does.

Needed for layers with a nonlinearity in the middle, which no decomposition gives, and useful for
all others: it finds what matters for the inputs that really occur. Every layer is trained alone on

    |student(x) - teacher(x)|^2 / |teacher(x)|^2

for inputs x of the dense layer, by AdamW (Loshchilov and Hutter 2019) with steps relative to every
parameter's size (as in Adafactor, Shazeer and Stern 2018, section 8): factors that start from a
dense layer differ in size by orders of magnitude.

`distill` and `distill_model` do the training. Around them: `refit_output` for a closed-form last
step of a bottleneck layer, and `gaussian_batches` where the inputs that occurred are known by their
second moment alone (`outlast.tensorize.convert.moments.InputMoments`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.convert.factored import root_sum, working_copy
from outlast.tensorize.convert.start import Bottleneck

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
    weight_decay: float = 0.0,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[float, ...]:
    """Train one layer to answer as another.

    Args:
        student: Layer to train, in place; half-precision parameters are float32 meanwhile.
        teacher: Layer to imitate; not changed.
        batches: Inputs (..., in_features), one step each; calibration data, or `gaussian_batches`.
        learning_rate: Of AdamW, relative to the parameters, see `LearningRate` and `cosine`.
        weight_decay: Of AdamW.
        on_step: Called with the step and the relative error before it.

    Returns:
        ``|student(x) - teacher(x)| / |teacher(x)|`` of every batch, before its step.

    Raises:
        TensorizeError: Where errors stop being finite.
    """
    errors: list[float] = []
    with _widened(student):
        trainer = _Trainer(student, learning_rate, weight_decay)
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
    weight_decay: float = 0.0,
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
        weight_decay: As in `distill`.
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
                trainer = _Trainer(layer, learning_rate, weight_decay)
                handles.append(
                    dense.register_forward_hook(_step_of(name, trainer, latest), with_kwargs=True)
                )
            for number, batch in enumerate(batches):
                latest.clear()
                with torch.no_grad():
                    _call(teacher, batch)
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


@torch.no_grad()
def refit_output(
    student: Bottleneck, teacher: nn.Module, batches: Iterable[Tensor], *, damping: float = 1e-9
) -> float:
    """Set `up` and its bias to the least-squares solution for the `down` that is there.

    The output is linear in both, so for given inputs they have a closed form: a good last step of
    a distillation.

    Args:
        student: The layer, changed in place.
        teacher: Layer to imitate.
        batches: Inputs (..., in_features).
        damping: Added to the diagonal of the activations' second moment, as a share of its mean.

    Returns:
        ``|student(x) - teacher(x)| / |teacher(x)|`` over all batches afterwards, but for rounding
        to the parameters' type.

    Raises:
        TensorizeError: For no inputs, or values that are not finite.
    """
    down = working_copy(student.down.weight, "down")
    biased = student.up.bias is not None
    width = down.shape[0] + biased
    moment = down.new_zeros(width, width)
    cross = down.new_zeros(student.up.out_features, width)
    total = 0.0
    for batch in batches:
        rows = batch.reshape(-1, batch.shape[-1])
        wanted = teacher(rows).to(down)
        hidden = ACTIVATIONS[student.activation](rows.to(down) @ down.mT)
        if biased:
            hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        moment += hidden.mT @ hidden
        cross += wanted.mT @ hidden
        total += float(wanted.square().sum())
    if not bool(torch.isfinite(cross).all() & torch.isfinite(moment).all()):
        raise TensorizeError("distillation met values that are not finite: check the inputs")
    if not total:
        raise TensorizeError("batches hold no input for which the dense layer answers: give more")
    damped = moment + torch.eye(width).to(moment) * (damping * moment.diagonal().mean())
    answer = torch.linalg.solve(damped, cross.mT, left=True).mT
    student.up.weight.copy_(answer[:, : down.shape[0]])
    if biased:
        student.up.bias.copy_(answer[:, -1])
    left = total - 2.0 * float((answer * cross).sum()) + float(((answer @ moment) * answer).sum())
    return root_sum(left / total)


def gaussian_batches(
    moment: Tensor,
    *,
    rows: int,
    count: int,
    mean: Tensor | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Tensor]:
    """Normal inputs with this second moment, where the calibration data are gone.

    Args:
        moment: (in, in) E[x x^T], or (in,) E[x^2].
        rows: Inputs in a batch.
        count: Batches.
        mean: (in,) E[x]; None: 0.
        generator: Source of the numbers, on the moment's device.
        dtype: Of the batches.

    Yields:
        (rows, in) on the moment's device.

    Raises:
        TensorizeError: For a moment that is not finite.
    """
    wide = working_copy(moment, "moment")
    centre = torch.zeros_like(wide[0] if wide.dim() == 2 else wide)
    if mean is not None:
        centre = working_copy(mean, "mean").to(wide)
    if wide.dim() == 1:
        root = torch.diag((wide - centre.square()).clamp(min=0).sqrt())
    else:
        values, vectors = torch.linalg.eigh(wide - torch.outer(centre, centre))
        root = vectors * values.clamp(min=0).sqrt()
    for _ in range(count):
        noise = torch.randn(
            rows, len(centre), generator=generator, dtype=wide.dtype, device=wide.device
        )
        yield (noise @ root.mT + centre).to(dtype)


class _Trainer:
    """AdamW on one layer."""

    def __init__(
        self, student: nn.Module, learning_rate: LearningRate, weight_decay: float
    ) -> None:
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
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=weight_decay)
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


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, Sequence):
        model(*batch)
    else:
        model(batch)


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
