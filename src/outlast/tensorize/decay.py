"""Hooks of optimizers: weight decay on products of factors, and bounds on their steps.

Weight decay on the product of the factors.

Decaying both factors of W = B A by 1 - c shrinks W by about 1 - 2 c, and pulls towards the smallest
nuclear norm instead of the smallest Frobenius norm (Srebro et al. 2004), whatever the rule was
tuned for. Here the penalty is the dense layer's, ``||W||_F^2 / 2``, and the factors follow its
gradient::

    G_k = d(||W||_F^2 / 2) / d(core k),      for two factors (B^T B) A and B (A A^T)
    core k <- core k - rate_k decay s G_k,   s = ||W||_F^2 / sum_j ||G_j||_F^2

It is decoupled as in AdamW: applied before the step, outside of the moments. The share s makes
``||W||_F^2`` fall at the dense layer's pace: to first order and with equal rates its change is
-2 rate decay ``||W||_F^2``, whatever the scale of the cores. It also makes large rates safe. W is
linear in every core, so <core k, G_k> = ``||W||_F^2`` <= ``||core k|| ||G_k||``, and no core moves
by more than rate_k decay of its own norm.

The gradients come from Gram matrices between the cores (`initialize.norm_gradients`); W is not
built.

A bound on how far one step can move the product of two factors, in the spectral norm.

Training W = B A natively with AdamW spikes, because nothing bounds the step of the product
(Spectron, arXiv 2602.12429). With changes dA and dB of the factors ::

    dW = (B + dB)(A + dA) - B A = dB A + B dA + dB dA

*Orthogonalised* (Spectron). Both changes become rho times a matrix of spectral norm at most 1::

    ||dW||_2 <= rho (||A||_2 + ||B||_2) + rho^2

which is at most the limit eta for rho = eta / (||A||_2 + ||B||_2 + 1) if rho <= 1, the published
rule. The root of the quadratic, rho = 2 eta / (n + sqrt(n^2 + 4 eta)) with n = ||A||_2 + ||B||_2,
attains eta, is never smaller than the published one where that holds, and needs no rho <= 1.

*Rescaled*. Both changes are multiplied by one s <= 1, and left alone where s = 1 does::

    ||dW(s)||_2 <= s ||dB A + B dA||_2 + s^2 ||dB dA||_2 <= eta

with s the root of the quadratic on the right. The first term is the product
[dB B] [A; dA] of two matrices with 2 r columns and rows, whose norm follows from their Gram
matrices: unlike ||dB|| ||A|| + ||B|| ||dA|| it sees what cancels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.initialize import norm_gradients
from outlast.tensorize.muon import (
    bounded_root,
    norm_bound,
    orthogonalize,
    power_norm,
    product_norm_bound,
)
from outlast.tensorize.parameters import some_layers, structured_layers
from outlast.tensorize.sharded import as_stored, precise, sharded_like, whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.tensorize.parameters import StructuredPart


class ProductDecay:
    """Decays the product of every structured layer before each step of an optimizer.

    The optimizer keeps its class and state; there is nothing to save, for nothing is remembered.
    With a nonlinearity between two factors their product is decayed all the same: it bounds the
    layer's slope. Frozen factors stay; their layer's others are decayed. Of a gated factor (rank
    control) the parameter behind the gate is decayed, by its own gradient, and the gate is not.

    Args:
        optimizer: Has the layers' factors in groups without decay of their own (see
            `parameter_groups`); the groups' current rates are used.
        model: With structured layers; those whose factors are all frozen or with another
            optimizer are passed over.
        weight_decay: As for a dense layer.

    Raises:
        TensorizeError: No layer to decay, a group that decays its factors too, or a negative decay.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, weight_decay: float) -> None:
        if not weight_decay >= 0.0:
            raise TensorizeError(f"weight_decay = {weight_decay} must be at least 0")
        self.weight_decay = weight_decay
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        layers = [
            layer
            for layer in structured_layers(model)
            if any(
                id(parameter) in held and parameter.requires_grad for parameter in layer.parameters
            )
        ]
        self._layers = some_layers(layers, "structured layers whose factors this optimizer trains")
        factors = {id(parameter): layer for layer in self._layers for parameter in layer.parameters}
        for other in optimizer.param_groups:
            found = next((factors[id(one)] for one in other["params"] if id(one) in factors), None)
            if found is not None and other.get("weight_decay"):
                raise TensorizeError(
                    f"weight_decay = {other['weight_decay']} of the group with {found.name}'s "
                    "factors decays them as well: set it to 0 there (parameter_groups does)"
                )
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Decay no more."""
        self._handle.remove()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = {
            id(parameter): group["lr"]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for layer in self._layers:
            self._decay(layer, rates)

    def _decay(self, layer: StructuredPart, rates: dict[int, float | Tensor]) -> None:
        # Gated factors are functions of their parameters.
        with torch.enable_grad(), as_stored():
            factors = layer.factors
        norm, gradients = norm_gradients(precise(factors), layer.network)
        trained = [
            (parameter, _by_parameter(factor, parameter, gradient), rates[id(parameter)])
            for factor, parameter, gradient in zip(
                factors, layer.parameters, gradients, strict=True
            )
            if parameter.requires_grad and id(parameter) in rates
        ]
        squares = sum(
            (gradient.square().sum() for _, gradient, _ in trained), torch.zeros_like(norm)
        )
        # A zero product has zero gradients: there is nothing to decay.
        share = torch.where(squares > 0.0, norm / squares, 0.0)
        for factor, gradient, rate in trained:
            change = gradient * (share * (rate * self.weight_decay))
            factor.sub_(sharded_like(change.to(factor.dtype), factor))


def _by_parameter(factor: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient by a parameter, of that by the factor that it is or that is computed from it."""
    if factor is parameter:
        return gradient
    upstream = sharded_like(gradient.to(factor.dtype), factor)
    (found,) = torch.autograd.grad(factor, parameter, upstream)
    return whole(found).to(gradient.dtype)


_TINY = torch.finfo(torch.float32).tiny

_FIRST_ITERATIONS = 10
"""Of the power iteration from a random vector; later ones begin near the end."""


class SpectralBound:
    """Bounds ``||dW||_2`` of every two-factor layer in every step of an optimizer.

    Works by hooks before and after the step, so that the optimizer keeps its class and its state.
    The factors of before the step are kept during it. Changes that are not finite are left alone,
    for others to see. With a nonlinearity between the factors it is their product that is bounded.
    Layers with more than two factors are passed over.

    Certified norms (the default) come from Gram matrices and never are too small, up to the
    rounding of the products (with TF32 allowed, 1e-3). They take about 8 r^2 (in + out) + 110 r^3
    operations per layer and step, which for r a quarter of both sizes is 3.6 r / tokens of the
    training itself: 2 % for r = 256 and 46000 tokens per step and rank, but 22 % for 4096. Power
    iteration takes next to nothing, but its norms are too small: with noisy gradients most steps
    stay within 1.15 times the limit, and all that were seen within 1.3 times.

    Either way it is the step before it is stored that is bounded: rounding to the parameters' dtype
    comes on top, which for bfloat16 can be more than a small limit.

    Args:
        optimizer: Has both factors of the layers; one that is frozen need not be in it.
        model: With two-factor layers; those that this optimizer does not train are passed over.
        limit: eta, the largest ``||dW||_2``, at the peak of the learning rate: where a group tells
            its ``initial_lr``, the limit falls with its rate.
        orthogonalize: Replace changes by orthogonal ones of the size that the limit allows, as
            Spectron does (with plain momentum before, for instance SGD), instead of rescaling
            those that are too large. Decay that the optimizer applies itself would be
            orthogonalised too: use `ProductDecay`.
        certified: Whether norms are upper bounds, or estimates by power iteration.
        iterations: Of the power iteration per step, which starts at the vectors of the step before.

    Raises:
        TensorizeError: No two-factor layer, a factor that is with another optimizer, or a limit or
            a number of iterations that is not positive; here or in a step, factors with gates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        limit: float,
        *,
        orthogonalize: bool = False,
        certified: bool = True,
        iterations: int = 2,
    ) -> None:
        if not 0.0 < limit < math.inf or iterations < 1:
            raise TensorizeError(
                f"limit = {limit} and iterations = {iterations} of a spectral bound must be "
                "positive and finite"
            )
        self.limit = limit
        self.orthogonalize = orthogonalize
        self.certified = certified
        self.iterations = iterations
        self._optimizer = optimizer
        self._layers = some_layers(
            [layer for layer in structured_layers(model) if self._trains(layer)],
            "two-factor layers that this optimizer trains",
        )
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._vectors: dict[str, Tensor] = {}
        self._steps = 0
        self._bounded: Tensor | float = 0.0
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def bounded_share(self) -> float:
        """Share of all (layer, step) whose change was too large so far; waits for the device."""
        return float(self._bounded) / max(self._steps * len(self._layers), 1)

    def remove(self) -> None:
        """Bound no more."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the vectors of the power iteration by layer."""
        return {
            "steps": self._steps,
            "bounded": float(self._bounded),
            "vectors": {name: vector.clone() for name, vector in self._vectors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._steps = int(state["steps"])
        self._bounded = float(state["bounded"])
        self._vectors = dict(state["vectors"])

    def _trains(self, layer: StructuredPart) -> bool:
        """Return whether a layer is to be bounded here."""
        if not layer.is_two_factor:
            return False
        groups = _groups(self._optimizer)
        factors = layer.parameters
        held = [id(factor) in groups for factor in factors]
        if any(held):
            _refuse_gates(layer)
        for factor, is_held in zip(factors, held, strict=True):
            if any(held) and factor.requires_grad and not is_held:
                raise TensorizeError(
                    f"only one factor of {layer.name} is with this optimizer: a bound on the "
                    "product needs both"
                )
        return any(held)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for layer in self._layers:
            _refuse_gates(layer)
            down, up = layer.parameters
            self._before[layer.name] = (down.clone(), up.clone())

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = _groups(optimizer)
        for layer in self._layers:
            limit = self.limit * min(
                _share_of_peak(groups.get(id(one))) for one in layer.parameters
            )
            self._bound(layer, self._before.pop(layer.name), limit)
        self._steps += 1

    def _bound(self, layer: StructuredPart, before: tuple[Tensor, Tensor], limit: float) -> None:
        factors = layer.parameters
        old_down, old_up, new_down, new_up = precise((*before, *factors))
        changes = new_down - old_down, new_up - old_up
        # Products of huge changes would leave the range before they are scaled down.
        largest = torch.maximum(changes[0].abs().max(), changes[1].abs().max())
        units = [change / largest.clamp(min=_TINY) for change in changes]
        most = torch.as_tensor(limit, dtype=largest.dtype, device=largest.device)
        if self.orthogonalize:
            norms = self._norm(layer, "A", old_down), self._norm(layer, "B", old_up)
            rho = bounded_root(norms[0] + norms[1], torch.ones_like(most), most)
            nearly = [orthogonalize(unit).to(unit.dtype) for unit in units]
            allowed = [rho * (unit / norm_bound(unit).clamp(min=_TINY)) for unit in nearly]
            applies = largest.isfinite() & rho.isfinite()
        else:
            first, second = self._terms(layer, (old_down, old_up), (units[0], units[1]))
            scale = bounded_root(first, second, most)
            allowed = [scale * unit for unit in units]
            # A NaN is not larger: what is not finite stays as it is.
            applies = largest > scale
        self._bounded = self._bounded + applies.to(torch.float32)
        olds, news = (old_down, old_up), (new_down, new_up)
        for factor, old, new, change in zip(factors, olds, news, allowed, strict=True):
            if factor.requires_grad:
                bounded = torch.where(applies, old + change, new).to(factor.dtype)
                factor.copy_(sharded_like(bounded, factor))

    def _terms(
        self, layer: StructuredPart, old: tuple[Tensor, Tensor], change: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """``||dB A + B dA||_2`` and ``||dB dA||_2``."""
        # Only the product of left and right matters: with balanced columns nothing is rounded off.
        sizes = [torch.linalg.matrix_norm(tensor) for tensor in (*old, *change)]
        balance = (sizes[0] / sizes[2]).sqrt() * (sizes[1] / sizes[3]).sqrt()
        balance = torch.where(balance.isfinite() & (balance > 0.0), balance, 1.0)
        left = torch.cat([change[1] * balance, old[1]], dim=1)
        right = torch.cat([old[0] / balance, change[0]], dim=0)
        if not self.certified:
            first = self._power(layer, "first", left, right)
            return first, self._power(layer, "second", change[1], change[0])
        # The limit must be held for numbers of any size, whose squares may leave the range.
        scales = [item.abs().max().clamp(min=_TINY) for item in (left, right)]
        left, right = left / scales[0], right / scales[1]
        grams = left.mT @ left, right @ right.mT
        rank = old[0].shape[0]
        scale = scales[0] * scales[1]
        first = scale * product_norm_bound(*grams)
        second = scale * product_norm_bound(grams[0][:rank, :rank], grams[1][rank:, rank:])
        return first, second / balance

    def _norm(self, layer: StructuredPart, which: str, matrix: Tensor) -> Tensor:
        if self.certified:
            return norm_bound(matrix)
        return self._power(layer, which, matrix)

    def _power(self, layer: StructuredPart, which: str, *matrices: Tensor) -> Tensor:
        """The norm of a product of matrices, from where its vector was in the step before."""
        key, iterations = f"{layer.name}:{which}", self.iterations
        columns = matrices[-1].shape[1]
        generator = torch.Generator().manual_seed(columns)
        start = torch.randn(columns, generator=generator).to(matrices[-1])
        known = self._vectors.get(key)
        if known is None or len(known) != columns:
            iterations = _FIRST_ITERATIONS
        else:
            # A little of everything lets the vector turn to where it had nothing.
            start = known.to(start) + 0.3 * start / torch.linalg.vector_norm(start)
        norm, self._vectors[key] = power_norm(matrices, start, iterations)
        return norm


def _refuse_gates(layer: StructuredPart) -> None:
    if layer.is_gated:
        raise TensorizeError(
            f"the factors of {layer.name} are computed from other parameters (gates of rank "
            "control): a bound on their steps needs the factors themselves; call "
            "RankControl.finish first, or leave the bound out"
        )


def _groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by the parameter's identity."""
    return {
        id(parameter): group for group in optimizer.param_groups for parameter in group["params"]
    }


def _share_of_peak(group: dict[str, Any] | None) -> float:
    """A group's rate over that at its peak; 1 where it does not tell."""
    if group is None or not group.get("initial_lr"):
        return 1.0
    return min(float(group["lr"]) / float(group["initial_lr"]), 1.0)
