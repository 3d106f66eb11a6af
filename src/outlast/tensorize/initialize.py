"""Initialization of cores, and the norm of their product.

Standard deviations of cores, so that their product starts like the dense weight it replaces.

An entry of the weight is a sum of products of core entries, one term for every value of the bonds.
With independent zero-mean entries the terms are uncorrelated, so ::

    Var W = (product of the cores' variances) x (product of the bonds' sizes)

Indices of x and y that several cores carry, such as the block index of block tensor trains, are not
summed and do not count. One equation leaves all but one of the deviations free. They are chosen
such that x with unit root mean square stays so through the chain: every core but the last gets
1 / sqrt(fan in), and the last takes the rest, which is where a dense layer would put its scale.
(CoMERA, arXiv 2405.14377, and CoLA, arXiv 2502.10940, spread the scale evenly instead, and CoLA
leaves out what its nonlinearity takes away.)

Norm of a chain's product, and its gradients, from the cores alone.

The chain's cores meet their own copies one after the other, as in the norm of a matrix product
state (Schollwoeck 2011, section 4.2.1): ``||W||_F^2`` is a sweep of two small contractions per
core, and the weight is never built. For two factors it is tr((B^T B)(A A^T)) with r x r matrices.
"""

from __future__ import annotations

import functools
import math
import string
from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS, check_activation
from outlast.tensorize.network import Route, lower
from outlast.tensorize.sharded import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor

    from outlast.tensorize.network import Network


def squared_norm(factors: Sequence[Tensor], network: Network) -> Tensor:
    """``||W||_F^2`` of the product of all cores, differentiable.

    Columns and rows of padding, where modes multiply to more than the features, count as well:
    cores make them like all others.

    Args:
        factors: The cores, with the shapes of `network`; in float32 or float64, since squares of
            small numbers leave the range of shorter types.
        network: How the cores hang together.

    Returns:
        A scalar.

    Raises:
        TensorizeError: The factors are not those of the network.
    """
    check_factors(factors, network)
    between: Tensor | None = None
    for core, (with_core, with_copy) in zip(factors, _sweep(network), strict=True):
        if between is not None:
            half = torch.einsum(with_core, between, core)
            between = torch.einsum(with_copy, half, core)
        else:
            between = torch.einsum(with_copy, core, core)
    assert between is not None
    return between


def norm_gradients(
    factors: Sequence[Tensor], network: Network
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of ``||W||_F^2 / 2`` by the cores.

    For two factors W = B A they are (B^T B) A and B (A A^T).

    Args:
        factors: As for `squared_norm`; not changed, and nothing is accumulated into their ``grad``.
        network: As for `squared_norm`.

    Returns:
        ``||W||_F^2``, and per core its gradient.
    """
    leaves = [factor.detach().requires_grad_(True) for factor in factors]
    with torch.enable_grad():
        norm = squared_norm(leaves, network)
        gradients = torch.autograd.grad(norm / 2.0, leaves)
    return norm.detach(), gradients


def check_factors(factors: Sequence[Tensor], network: Network) -> None:
    """Refuse cores that are not those of a network.

    Raises:
        TensorizeError: Their number or shapes differ.
    """
    given = [tuple(factor.shape) for factor in factors]
    wanted = [network.shape(core) for core in range(len(network.cores))]
    if given != wanted:
        raise TensorizeError(f"factors of shapes {given} were given, but {network} has {wanted}")


@functools.lru_cache(maxsize=4096)
def _sweep(network: Network) -> tuple[tuple[str, str], ...]:
    """The einsum equations that add each core and then its copy to what is between them."""
    # Other letters for the bonds of the copies; features are shared with the cores.
    used = {letter for letter, _ in network.sizes}
    spare = [letter for letter in string.ascii_letters if letter not in used]
    if len(spare) < len(network.bonds):
        raise TensorizeError(f"the network {network} has too many indices for one sweep")
    copies = {ord(bond): letter for bond, letter in zip(network.bonds, spare, strict=False)}
    between = ""
    equations: list[tuple[str, str]] = []
    for place, core in enumerate(network.cores):
        copy = core.translate(copies)
        later = "".join(network.cores[place + 1 :])
        later += later.translate(copies)
        half = _needed(between + core, copy + later) if place else core
        kept = _needed(half + copy, later)
        equations.append((f"{between},{core}->{half}", f"{half},{copy}->{kept}"))
        between = kept
    return tuple(equations)


def _needed(letters: str, later: str) -> str:
    return "".join(letter for letter in dict.fromkeys(letters) if letter in later)


_TOLERANCE = 2e-3
"""Relative error of the product's deviation that sampling may leave."""


def fans(network: Network, *, one_hot: bool = False) -> tuple[tuple[int, int], ...]:
    """(fan in, fan out) of every core when the cores meet x one after the other.

    The fan in is the number of terms that the core's contraction sums, the fan out the number of
    features that it makes for each value of the indices that pass by (arXiv 2406.06248: r_i m_i and
    r_(i+1) n_i).

    Args:
        network: The chain.
        one_hot: x picks rows (an embedding): input modes are not summed over.
    """
    stages = lower(network, Route((1,) * len(network.cores))).stages
    found = []
    for stage in stages:
        summed = stage.contracted
        if one_hot:
            summed = "".join(letter for letter in summed if letter not in network.inputs)
        found.append((network.size(summed), network.size(stage.new)))
    return tuple(found)


def core_stds(
    network: Network, target_std: float, activation_gain: float = 1.0
) -> tuple[float, ...]:
    """Standard deviation of every core's entries, in the order of the chain.

    Args:
        network: The chain.
        target_std: Standard deviation of the dense weight's entries. Zero makes only the last core
            zero, so that the layer starts at zero and yet learns.
        activation_gain: What a nonlinearity between two factors leaves of a unit root mean square
            (see `activation_gain`): y then has the variance that the dense layer gives it.

    Returns:
        One deviation per core.

    Raises:
        TensorizeError: A negative or infinite deviation, or a gain that is not positive.
    """
    if not 0.0 <= target_std < math.inf:
        raise TensorizeError(
            f"std = {target_std} of a weight must be a finite number of at least 0"
        )
    if not 0.0 < activation_gain < math.inf:
        raise TensorizeError(
            f"activation_gain = {activation_gain} must be positive: 1 stands for no activation"
        )
    first = [1.0 / math.sqrt(fan_in) for fan_in, _ in fans(network)[:-1]]
    others = math.prod(first) * math.sqrt(network.size(network.bonds)) * activation_gain
    return (*first, target_std / others)


@functools.lru_cache(maxsize=64)
def activation_gain(activation: str) -> float:
    """sqrt(E[act(h)^2]) for standard normal h: 1 for the identity, 0.5965 for SiLU.

    By the trapezoidal rule, whose error falls faster than any power of the step for smooth
    integrands that vanish at the ends, and as its square at kinks. 10 deviations to each side and a
    step of 1/1000 leave less than 1e-6 for all common activations.

    Args:
        activation: A name that `BottleneckLinear` knows.

    Raises:
        TensorizeError: An unknown name.
    """
    check_activation(activation)
    step = 1e-3
    points = torch.arange(-10_000, 10_001, dtype=torch.float64, device="cpu") * step
    density = torch.exp(-points.square() / 2.0) / math.sqrt(2.0 * math.pi)
    with torch.no_grad():
        return math.sqrt(float((ACTIVATIONS[activation](points).square() * density).sum() * step))


@torch.no_grad()
def initialize_(
    factors: Sequence[Tensor], network: Network, std: float, generator: Generator | None = None
) -> None:
    """Fill cores in place with normal numbers, for a product of a given standard deviation.

    Small cores are few samples, whose product can miss its deviation by 10 % and more. Where that
    is to be expected the last core is scaled by what is missing.

    Args:
        factors: The cores, with the shapes of `network`, on any device (also meta).
        network: The chain.
        std: Root mean square of the product's entries; see `core_stds`.
        generator: Source of the numbers; torch's own by default.

    Raises:
        TensorizeError: See `core_stds`; or the factors are not those of the network.
    """
    check_factors(factors, network)
    deviations = core_stds(network, std)
    if factors[0].is_meta:
        return
    fill_(factors, deviations, generator)
    scatter = math.sqrt(sum(0.5 / max(factor.numel(), 1) for factor in factors))
    if std and scatter > _TOLERANCE:
        # Divided by their deviations and by how many terms they make, cores of any scale and of any
        # number give a square in range: it is expected to be one.
        parts = zip(factors, deviations, network.cores, strict=True)
        units = [
            whole(factor).float() / (deviation * _terms(network, letters))
            for factor, deviation, letters in parts
        ]
        missing = squared_norm(units, network).rsqrt()
        factors[-1].copy_(factors[-1] * missing.to(factors[-1].dtype))


def _terms(network: Network, letters: str) -> float:
    """A core's part of the square root of how many products of entries the weight is made of."""
    logarithm = 0.0
    for letter in letters:
        shared = sum(letter in core for core in network.cores)
        logarithm += math.log(network.size(letter)) / shared
    return math.exp(logarithm / 2.0)


@torch.no_grad()
def fill_(
    factors: Sequence[Tensor], deviations: Sequence[float], generator: Generator | None = None
) -> None:
    """Fill cores in place with normal numbers of mean zero; zeros where the deviation is zero."""
    for factor, deviation in zip(factors, deviations, strict=True):
        factor.normal_(0.0, deviation, generator=generator)
