"""Weight decay on the product of the factors.

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

The gradients come from Gram matrices between the cores (`product.norm_gradients`); W is not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.rules.layers import some_layers, structured_layers
from outlast.tensorize.rules.product import norm_gradients
from outlast.tensorize.sharded import as_stored, precise, sharded_like, whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.tensorize.rules.layers import StructuredPart


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
        self._refuse_double_decay(optimizer)
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Decay no more."""
        self._handle.remove()

    def _refuse_double_decay(self, optimizer: Optimizer) -> None:
        factors = {id(parameter): layer for layer in self._layers for parameter in layer.parameters}
        for group in optimizer.param_groups:
            found = next((factors[id(one)] for one in group["params"] if id(one) in factors), None)
            if found is not None and group.get("weight_decay"):
                raise TensorizeError(
                    f"weight_decay = {group['weight_decay']} of the group with {found.name}'s "
                    "factors decays them as well: set it to 0 there (parameter_groups does)"
                )

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
