"""Optimizers of structured layers: Muon for cores, decay of products, and bounds on their steps.

Muon orthogonalises the update of a matrix between hidden features (Jordan et al. 2024). A core is
such a matrix too, once its dimensions are sorted into those that the chain sums over (columns),
those that it makes (rows), and those that pass by, which number independent matrices (batch): the
steepest step for the largest change that x can see is then taken for every block by itself.
`torch.optim.Muon` refuses parameters that are not matrices.

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

Both changes are multiplied by one s <= 1, and left alone where s = 1 does::

    ||dW(s)||_2 <= s ||dB A + B dA||_2 + s^2 ||dB dA||_2 <= eta

with s the root of the quadratic on the right. The first term is the product
[dB B] [A; dA] of two matrices with 2 r columns and rows, whose norm follows from their Gram
matrices: unlike ||dB|| ||A|| + ||B|| ||dA|| it sees what cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outlast.errors import TensorizeError
from outlast.tensorize.initialize import norm_gradients
from outlast.tensorize.network import Route, lower
from outlast.tensorize.parameters import some_layers, structured_layers
from outlast.tensorize.sharded import precise, sharded_like, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from outlast.tensorize.network import Network
    from outlast.tensorize.parameters import StructuredPart


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that maps singular values towards one (Jordan et al. 2024, Muon)."""

_SQUARINGS = 5


def orthogonalize(
    matrices: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    iterations: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Matrices with the same singular vectors and singular values near one, by Newton-Schulz.

    X <- a X + b (X X^T) X + c (X X^T)^2 X, from X of unit Frobenius norm, in bfloat16 as Muon does.
    With the published coefficients five iterations bring singular values to between about 0.7 and
    1.2; those that are tiny beside the largest stay smaller.

    Args:
        matrices: (..., m, n) with at most one leading dimension.
        coefficients: a, b and c.
        iterations: Of the polynomial.
        eps: Smallest norm that is divided by; a zero matrix stays zero.

    Returns:
        The shape of `matrices`, in bfloat16.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(iterations):
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    return x.mT if tall else x


def product_norm_bound(left_gram: Tensor, right_gram: Tensor) -> Tensor:
    """An upper bound of ``||P Q||_2`` from P^T P and Q Q^T.

    The squares of P Q's singular values are the eigenvalues of M = (P^T P)(Q Q^T), and for any
    power p the Frobenius norm of M^p is at least its largest eigenvalue to the p::

        ||P Q||_2 <= ||M^p||_F^(1 / 2p),   p = 32

    Squaring M five times gives that. At most it is k^(1/128) times too large, 4 % for k = 128, and
    no more than one large singular value costs nothing. A term for the rounding of both Gram
    matrices is added.

    Args:
        left_gram: (k, k), P^T P.
        right_gram: (k, k), Q Q^T.

    Returns:
        A scalar.
    """
    size, info = len(left_gram), torch.finfo(left_gram.dtype)
    scales = [torch.linalg.matrix_norm(gram) for gram in (left_gram, right_gram)]
    units = [
        gram / scale.clamp(min=info.tiny)
        for gram, scale in zip((left_gram, right_gram), scales, strict=True)
    ]
    gram = power = units[0] @ units[1]
    logarithm = torch.zeros((), dtype=gram.dtype, device=gram.device)
    for squaring in range(_SQUARINGS):
        norm = torch.linalg.matrix_norm(power).clamp(min=info.tiny)
        logarithm = logarithm + norm.log() / 2**squaring
        power = power / norm
        power = power @ power
    last = torch.linalg.matrix_norm(power).clamp(min=info.tiny)
    largest = (logarithm + last.log() / 2**_SQUARINGS).exp()
    eigenvalue = largest + size * info.eps * torch.linalg.matrix_norm(gram)
    # Of each unit Gram matrix, every entry is wrong by some of its type's spacing.
    eigenvalue = eigenvalue + size * info.eps
    bound: Tensor = eigenvalue.sqrt() * scales[0].sqrt() * scales[1].sqrt()
    return bound


def power_norm(matrices: Sequence[Tensor], start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """An estimate from below of the spectral norm of a product, by power iteration.

    Args:
        matrices: The factors of the product, in the order in which it is written.
        start: (n,) a vector to begin with: random at first, then that of the call before.
        iterations: Products with the transposed product times the product.

    Returns:
        The norm of the product times the unit vector that was reached, and that vector.
    """
    tiny = torch.finfo(start.dtype).tiny
    vector = start / torch.linalg.vector_norm(start).clamp(min=tiny)
    for _ in range(iterations):
        image = _applied(matrices, vector)
        pulled = _applied([matrix.mT for matrix in matrices[::-1]], image)
        length = torch.linalg.vector_norm(pulled)
        # A vector that the product maps to zero is kept: the next product may differ.
        vector = torch.where(length > tiny, pulled / length.clamp(min=tiny), vector)
    return torch.linalg.vector_norm(_applied(matrices, vector)), vector


def _applied(matrices: Sequence[Tensor], vector: Tensor) -> Tensor:
    for matrix in reversed(matrices):
        vector = matrix @ vector
    return vector


def bounded_root(linear: Tensor, quadratic: Tensor, limit: Tensor) -> Tensor:
    """The largest s with s linear + s^2 quadratic <= limit; infinite where both are zero.

    Args:
        linear: At least 0.
        quadratic: At least 0.
        limit: At least 0.
    """
    # Both are divided by the larger one, whose square could leave the range.
    scale = torch.maximum(linear, quadratic)
    one, two, most = linear / scale, quadratic / scale, limit / scale
    root = 2.0 * most / (one + (one.square() + 4.0 * most * two).sqrt())
    return torch.where(scale > 0.0, root, math.inf)


@dataclass(frozen=True)
class Unfolding:
    """Division of a core's dimensions into the two sides of its matrix.

    Attributes:
        batch: Dimensions that number independent matrices.
        rows: Dimensions of what the core makes.
        columns: Dimensions of what it sums over.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All dimensions, batch first and columns last."""
        return self.batch + self.rows + self.columns

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Matrices, and rows and columns of each, for a core of this shape."""
        batch, rows, columns = (
            math.prod(shape[dimension] for dimension in dimensions)
            for dimensions in (self.batch, self.rows, self.columns)
        )
        return batch, rows, columns

    def unfold(self, core: Tensor) -> Tensor:
        """The matrices, of shape (batch, rows, columns), or (rows, columns) without a batch."""
        batch, rows, columns = self.sides(tuple(core.shape))
        matrices = core.permute(self.order).reshape(batch, rows, columns)
        return matrices if self.batch else matrices[0]

    def fold(self, matrices: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The core whose unfolding these matrices are."""
        permuted = matrices.reshape([shape[dimension] for dimension in self.order])
        return permuted.permute(tuple(self.order.index(place) for place in range(len(shape))))


MATRIX = Unfolding((), (0,), (1,))
"""Of a parameter that is a matrix already, with the outputs first as in `nn.Linear`."""


def unfoldings(network: Network) -> tuple[Unfolding, ...]:
    """The unfolding of every core when the cores meet x one after the other."""
    stages = lower(network, Route((1,) * len(network.cores))).stages
    found = []
    for letters, stage in zip(network.cores, stages, strict=True):
        batch, rows = (
            tuple(place for place, letter in enumerate(letters) if letter in side)
            for side in (stage.batch, stage.new)
        )
        rest = tuple(place for place in range(len(letters)) if place not in batch + rows)
        found.append(Unfolding(batch, rows, rest))
    return tuple(found)


def factor_unfoldings(model: nn.Module) -> dict[Tensor, Unfolding]:
    """The unfolding of each factor of a model's structured linear layers, for `UnfoldedMuon`.

    Embeddings are left out: their rows are picked, not summed, and belong to AdamW.
    """
    return {
        factor: unfolding
        for layer in structured_layers(model)
        if not layer.looks_up
        for factor, unfolding in zip(layer.parameters, unfoldings(layer.network), strict=True)
    }


class UnfoldedMuon(Optimizer):
    """Muon, for matrices and for cores that are unfolded to matrices.

    On matrices it computes what `torch.optim.Muon` computes, and has the same state and settings.
    Sharded parameters are gathered, and every rank computes the update of its own part.

    Args:
        params: Parameters or groups, as for any optimizer.
        unfoldings: How to unfold parameters; matrices that are not in it are taken as they are.
        lr: Learning rate.
        weight_decay: Decoupled, of each parameter by itself; 0 where `ProductDecay` is used.
        momentum: Of the moving average of gradients.
        nesterov: Whether to look ahead by one step of momentum.
        ns_coefficients: Of the Newton-Schulz polynomial.
        eps: Smallest norm that is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: ``original``: rate times sqrt(max(1, rows / columns)); ``match_rms_adamw``:
            rate times 0.2 sqrt(max(rows, columns)); None is the first.

    Raises:
        TensorizeError: A parameter that is no matrix and has no unfolding, or a setting out of
            range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        unfoldings: Mapping[Tensor, Unfolding] | None = None,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if not (lr >= 0.0 and weight_decay >= 0.0 and 0.0 <= momentum <= 1.0):
            raise TensorizeError(
                f"lr = {lr}, weight_decay = {weight_decay} and momentum = {momentum} must be at "
                "least 0, the last at most 1"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise TensorizeError(
                f"adjust_lr_fn = {adjust_lr_fn!r} must be 'original' or 'match_rms_adamw'"
            )
        self._unfoldings = dict(unfoldings or {})
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, each of whose parameters is a matrix or can be unfolded to some.

        Raises:
            TensorizeError: One is and can not; then the group is not added.
        """
        params = param_group["params"]
        if not isinstance(params, torch.Tensor | set):
            # A generator can be read only once.
            params = list(params)
            param_group["params"] = params
        for item in [params] if isinstance(params, torch.Tensor) else params:
            # Parameters may come with their names.
            parameter = item[1] if isinstance(item, tuple) else item
            known = self._unfoldings.get(parameter, MATRIX)
            if sorted(known.order) != list(range(parameter.ndim)):
                raise TensorizeError(
                    f"a parameter of shape {tuple(parameter.shape)} is no matrix: give its "
                    "unfolding (factor_unfoldings(model)) or leave it to AdamW"
                )
        super().add_param_group(param_group)

    def exchange(self, parameters: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Unfold new parameters as the (old, new) ones they replace, after a change of rank."""
        for old, new in parameters:
            if old in self._unfoldings:
                self._unfoldings[new] = self._unfoldings.pop(old)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step.

        Args:
            closure: Computes the loss and its gradients anew.

        Returns:
            What `closure` gave.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum, average = group["momentum"], state["momentum_buffer"]
                average.lerp_(gradient, 1 - momentum)
                update = whole(gradient.lerp(average, momentum) if group["nesterov"] else average)
                unfolding = self._unfoldings.get(parameter, MATRIX)
                shape, lr = tuple(parameter.shape), float(group["lr"])
                matrices = unfolding.unfold(update)
                matrices = orthogonalize(
                    matrices, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                update = sharded_like(unfolding.fold(matrices, shape), parameter)
                _, rows, columns = unfolding.sides(shape)
                if group["adjust_lr_fn"] == "match_rms_adamw":
                    adjusted = lr * 0.2 * math.sqrt(max(rows, columns))
                else:
                    adjusted = lr * math.sqrt(max(1.0, rows / columns))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-adjusted)
        return loss


class ProductDecay:
    """Decays the product of every structured layer before each step of an optimizer.

    The optimizer keeps its class and state; there is nothing to save, for nothing is remembered.
    With a nonlinearity between two factors their product is decayed all the same: it bounds the
    layer's slope. Frozen factors stay; their layer's others are decayed.

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
        groups = _groups(optimizer)
        self._layers = some_layers(
            [
                layer
                for layer in structured_layers(model)
                if any(id(one) in groups and one.requires_grad for one in layer.parameters)
            ],
            "structured layers whose factors this optimizer trains",
        )
        for layer in self._layers:
            decays = [groups.get(id(one), {}).get("weight_decay") for one in layer.parameters]
            if decay := next(filter(None, decays), None):
                raise TensorizeError(
                    f"weight_decay = {decay} of the group with {layer.name}'s factors decays them "
                    "as well: set it to 0 there (parameter_groups does)"
                )
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = _groups(optimizer)
        for layer in self._layers:
            factors = layer.parameters
            norm, gradients = norm_gradients(precise(factors), layer.network)
            trained = [
                (factor, gradient, groups[id(factor)]["lr"])
                for factor, gradient in zip(factors, gradients, strict=True)
                if factor.requires_grad and id(factor) in groups
            ]
            squares = sum(
                (gradient.square().sum() for _, gradient, _ in trained), torch.zeros_like(norm)
            )
            # A zero product has zero gradients: there is nothing to decay.
            share = torch.where(squares > 0.0, norm / squares, 0.0)
            for factor, gradient, rate in trained:
                change = gradient * (share * (rate * self.weight_decay))
                factor.sub_(sharded_like(change.to(factor.dtype), factor))


_TINY = torch.finfo(torch.float32).tiny

_FIRST_ITERATIONS = 10
"""Of the power iteration from a random vector; later ones begin near the end."""


_ITERATIONS = 2
"""Of the power iteration per step, which starts at the vectors of the step before."""


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
        certified: Whether norms are upper bounds, or estimates by power iteration.

    Raises:
        TensorizeError: No two-factor layer, a factor that is with another optimizer, or a limit
            that is not positive.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, limit: float, *, certified: bool = True
    ) -> None:
        if not 0.0 < limit < math.inf:
            raise TensorizeError(f"limit = {limit} of a spectral bound must be positive and finite")
        self.limit = limit
        self.certified = certified
        groups, layers = _groups(optimizer), []
        for layer in structured_layers(model):
            held = [id(factor) in groups for factor in layer.parameters]
            if not layer.is_two_factor or not any(held):
                continue
            if any(
                factor.requires_grad and not is_held
                for factor, is_held in zip(layer.parameters, held, strict=True)
            ):
                raise TensorizeError(
                    f"only one factor of {layer.name} is with this optimizer: a bound on the "
                    "product needs both"
                )
            layers.append(layer)
        self._layers = some_layers(layers, "two-factor layers that this optimizer trains")
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._vectors: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def state_dict(self) -> dict[str, Any]:
        """The vectors of the power iteration, by layer."""
        return {"vectors": {name: vector.clone() for name, vector in self._vectors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self._vectors = dict(state["vectors"])

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for layer in self._layers:
            down, up = layer.parameters
            self._before[layer.name] = (down.clone(), up.clone())

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = _groups(optimizer)
        for layer in self._layers:
            shares = [1.0]
            for factor in layer.parameters:
                group = groups.get(id(factor), {})
                if group.get("initial_lr"):
                    shares.append(float(group["lr"]) / float(group["initial_lr"]))
            self._bound(layer, self._before.pop(layer.name), self.limit * min(shares))

    def _bound(self, layer: StructuredPart, before: tuple[Tensor, Tensor], limit: float) -> None:
        factors = layer.parameters
        down, up, new_down, new_up = precise((*before, *factors))
        changes = new_down - down, new_up - up
        # Products of huge changes would leave the range before they are scaled down.
        largest = torch.maximum(changes[0].abs().max(), changes[1].abs().max())
        units = [change / largest.clamp(min=_TINY) for change in changes]
        most = torch.as_tensor(limit, dtype=largest.dtype, device=largest.device)
        # Only the product of left and right matters: with balanced columns nothing is rounded off.
        sizes = [torch.linalg.matrix_norm(tensor) for tensor in (down, up, *units)]
        balance = (sizes[0] / sizes[2]).sqrt() * (sizes[1] / sizes[3]).sqrt()
        balance = torch.where(balance.isfinite() & (balance > 0.0), balance, 1.0)
        left = torch.cat([units[1] * balance, up], dim=1)
        right = torch.cat([down / balance, units[0]], dim=0)
        if self.certified:
            # The limit must be held for numbers of any size, whose squares may leave the range.
            scales = [item.abs().max().clamp(min=_TINY) for item in (left, right)]
            left, right = left / scales[0], right / scales[1]
            grams = left.mT @ left, right @ right.mT
            rank, scale = down.shape[0], scales[0] * scales[1]
            first = scale * product_norm_bound(*grams)
            second = scale * product_norm_bound(grams[0][:rank, :rank], grams[1][rank:, rank:])
            second = second / balance
        else:
            first = self._power(f"{layer.name}:first", left, right)
            second = self._power(f"{layer.name}:second", units[1], units[0])
        scale = bounded_root(first, second, most)
        # A NaN is not larger: what is not finite stays as it is.
        applies = largest > scale
        olds, news = (down, up), (new_down, new_up)
        for factor, old, new, unit in zip(factors, olds, news, units, strict=True):
            if factor.requires_grad:
                bounded = torch.where(applies, old + scale * unit, new).to(factor.dtype)
                factor.copy_(sharded_like(bounded, factor))

    def _power(self, key: str, *matrices: Tensor) -> Tensor:
        """The norm of a product of matrices, from where its vector was in the step before."""
        columns, iterations = matrices[-1].shape[1], _ITERATIONS
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


def _groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by the parameter's identity."""
    return {
        id(parameter): group for group in optimizer.param_groups for parameter in group["params"]
    }
