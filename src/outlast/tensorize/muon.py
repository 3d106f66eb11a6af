"""Muon for structured layers.

Muon for cores of any number of dimensions, as the matrices that they are in the chain.

Muon orthogonalises the update of a matrix between hidden features (Jordan et al. 2024). A core is
such a matrix too, once its dimensions are sorted into those that the chain sums over (columns),
those that it makes (rows), and those that pass by, which number independent matrices (batch): the
steepest step for the largest change that x can see is then taken for every block by itself.
`torch.optim.Muon` refuses parameters that are not matrices.

Nearest orthogonal matrices, and upper bounds of spectral norms, with matrix products alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outlast.errors import TensorizeError
from outlast.tensorize.network import Route, lower
from outlast.tensorize.parameters import structured_layers
from outlast.tensorize.sharded import sharded_like, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from outlast.tensorize.network import Network


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


def norm_bound(matrix: Tensor) -> Tensor:
    """An upper bound of ``||M||_2``, at most k^(1/128) times too large: 4 % for k = 128.

    k is the smaller one of rows and columns; no more than one large singular value costs nothing.

    See `product_norm_bound`, with the identity as the other matrix.

    Args:
        matrix: (m, n).

    Returns:
        A scalar, in at least float32.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    scale = matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = matrix / scale
    rows, columns = matrix.shape
    gram = matrix @ matrix.mT if rows < columns else matrix.mT @ matrix
    bound: Tensor = scale * gram_bound(gram).sqrt()
    return bound


def product_norm_bound(left_gram: Tensor, right_gram: Tensor) -> Tensor:
    """An upper bound of ``||P Q||_2`` from P^T P and Q Q^T.

    The squares of P Q's singular values are the eigenvalues of M = (P^T P)(Q Q^T), and for any
    power p the Frobenius norm of M^p is at least its largest eigenvalue to the p::

        ||P Q||_2 <= ||M^p||_F^(1 / 2p),   p = 32

    Squaring M five times gives that. A term for the rounding of both Gram matrices is added.

    Args:
        left_gram: (k, k), P^T P.
        right_gram: (k, k), Q Q^T.

    Returns:
        A scalar.
    """
    scales = [torch.linalg.matrix_norm(gram) for gram in (left_gram, right_gram)]
    units = [
        gram / scale.clamp(min=torch.finfo(gram.dtype).tiny)
        for gram, scale in zip((left_gram, right_gram), scales, strict=True)
    ]
    eigenvalue = gram_bound(units[0] @ units[1])
    # Of each unit Gram matrix, every entry is wrong by some of its type's spacing.
    eigenvalue = eigenvalue + len(left_gram) * torch.finfo(left_gram.dtype).eps
    bound: Tensor = eigenvalue.sqrt() * scales[0].sqrt() * scales[1].sqrt()
    return bound


def gram_bound(gram: Tensor) -> Tensor:
    """An upper bound of the largest eigenvalue of a matrix whose entries are at most about one.

    Args:
        gram: (k, k), with eigenvalues of at least zero; symmetric or a product of two such.

    Returns:
        A scalar.
    """
    size, info = gram.shape[0], torch.finfo(gram.dtype)
    logarithm = torch.zeros((), dtype=gram.dtype, device=gram.device)
    power = gram
    for squaring in range(_SQUARINGS):
        norm = torch.linalg.matrix_norm(power).clamp(min=info.tiny)
        logarithm = logarithm + norm.log() / 2**squaring
        power = power / norm
        power = power @ power
    last = torch.linalg.matrix_norm(power).clamp(min=info.tiny)
    largest = (logarithm + last.log() / 2**_SQUARINGS).exp()
    bound: Tensor = largest + size * info.eps * torch.linalg.matrix_norm(gram)
    return bound


def power_norm(
    matrices: Sequence[Tensor], start: Tensor, iterations: int = 2
) -> tuple[Tensor, Tensor]:
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
        sides = [
            tuple(place for place, letter in enumerate(letters) if letter in side)
            for side in (stage.batch, stage.new)
        ]
        rest = tuple(place for place in range(len(letters)) if place not in sides[0] + sides[1])
        found.append(Unfolding(sides[0], sides[1], rest))
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
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum, average = group["momentum"], state["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        update = whole(gradient.lerp(average, momentum) if group["nesterov"] else average)
        unfolding, shape = self._unfoldings.get(parameter, MATRIX), tuple(parameter.shape)
        matrices = orthogonalize(
            unfolding.unfold(update), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        update = sharded_like(unfolding.fold(matrices, shape), parameter)
        lr = float(group["lr"])
        _, rows, columns = unfolding.sides(shape)
        if group["adjust_lr_fn"] == "match_rms_adamw":
            adjusted = lr * 0.2 * math.sqrt(max(rows, columns))
        else:
            adjusted = lr * math.sqrt(max(1.0, rows / columns))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-adjusted)
