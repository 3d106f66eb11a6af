"""What structured layers cost and save, as pure functions of their settings; needs no torch.

The planner of the whole system composes these: parameters, floating-point operations, bytes that
are kept and sent, and how a training step shrinks. What a rank costs in quality is in
`outlast.tensorize.quality`. Operations count a multiplication and an addition as two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import TensorizeError
from outlast.tensorize.network import Route, lower
from outlast.tensorize.networks import (
    block_network,
    chosen_modes,
    cp_network,
    train_matrix_network,
    train_network,
    tucker_network,
)
from outlast.tensorize.shapes import block_modes, monarch_modes, monarch_rank

if TYPE_CHECKING:
    from outlast.tensorize.network import Network

TWO_FACTOR_FORMS = ("low_rank", "cola", "lax")
"""Two matrices with `rank` features between them; what is put between differs."""

FORMS = ("dense", *TWO_FACTOR_FORMS, "tt", "ttm", "btt", "monarch", "cp", "tucker", "sltrain")
"""Forms of which the cost is known."""

SLTRAIN_DENSITY = 0.03
"""Share of entries in the sparse part of low rank + sparse (arXiv 2406.02214, section 5)."""

_NEVER = 1 << 200
"""Operations of what cannot be done."""


@dataclass(frozen=True)
class LayerCost:
    """One layer.

    Attributes:
        parameters: Numbers that are learned, without the bias.
        forward_flops_per_token: Of the cheapest way through the chain: all ways to merge neighbours
            and both directions, the rebuilt dense weight among them. Merging, which does not
            depend on the tokens, is left out.
        training_flops_per_token: Forward and backward, on the way that is cheapest for both.
        kept_values_per_token: What is kept for the backward pass beyond x.
    """

    parameters: int
    forward_flops_per_token: int
    training_flops_per_token: int
    kept_values_per_token: int

    def kept_bytes(self, tokens: int, bytes_per_value: float = 2.0) -> float:
        """What `tokens` tokens keep beyond x."""
        return self.kept_values_per_token * tokens * bytes_per_value


def layer_cost(
    form: str,
    in_features: int,
    out_features: int,
    rank: int = 0,
    *,
    cores: int = 3,
    density: float = SLTRAIN_DENSITY,
) -> LayerCost:
    """What a layer costs.

    Args:
        form: One of `FORMS`.
        in_features: Features of x.
        out_features: Features of y.
        rank: Of low-rank factors, of all bonds, of blocks, or the number of terms (``cp``); the
            number of blocks of ``monarch``. ``dense`` needs none.
        cores: Modes on each side of ``tt`` and ``ttm``, ``cp`` and ``tucker``.
        density: Share of entries in the sparse part of ``sltrain``.

    Raises:
        TensorizeError: For an unknown form or numbers below 1.
    """
    if form not in FORMS:
        raise TensorizeError(f"form = {form!r} is not one of {', '.join(FORMS)}")
    if min(in_features, out_features, cores) < 1 or (form != "dense" and rank < 1):
        raise TensorizeError(
            f"a {form} layer of {in_features} x {out_features} features, rank = {rank} and "
            f"cores = {cores} is none: all of them must be at least 1"
        )
    dense = in_features * out_features
    if form == "dense":
        return LayerCost(dense, 2 * dense, 6 * dense, 0)
    factors = rank * (in_features + out_features)
    if form == "sltrain":
        # Its weight is rebuilt at each use.
        return LayerCost(factors + max(1, round(density * dense)), 2 * dense, 6 * dense, 0)
    if form in TWO_FACTOR_FORMS:
        # With something between the factors what is there is kept whatever it takes.
        kept = form != "low_rank" or 2 * rank <= in_features
        again = 0 if kept else 2 * in_features * rank
        return LayerCost(factors, 2 * factors, 6 * factors + again, rank if kept else 0)
    return _cheapest(_network(form, in_features, out_features, rank, cores))


def _network(form: str, in_features: int, out_features: int, rank: int, cores: int) -> Network:
    sizes = in_features, out_features
    if form == "monarch":
        modes = monarch_modes(*sizes, rank)
        rank = monarch_rank(*sizes, rank)
        return block_network(*sizes, rank, in_modes=modes[0], out_modes=modes[1])
    if form == "btt":
        modes = block_modes(*sizes)
        return block_network(*sizes, rank, in_modes=modes[0], out_modes=modes[1])
    build = {
        "tt": train_network,
        "ttm": train_matrix_network,
        "tucker": tucker_network,
        "cp": cp_network,
    }[form]
    into = chosen_modes(None, in_features, cores, name="cores")
    out = chosen_modes(None, out_features, cores, name="cores")
    return build(*sizes, rank, in_modes=into, out_modes=out)


@functools.lru_cache(maxsize=4096)
def _cheapest(network: Network) -> LayerCost:
    """The cheapest ways through a chain forward, and forward and backward."""
    ways = [_products(network, backwards) for backwards in (False, True)]
    forward = min(_shortest(way, first=2, last=2, keeping=False)[0] for way in ways)
    # The gradients of the factors and of x take as much as going forward each, and what goes into
    # a stage after the first comes again where it is not kept: all but the last product.
    kept = min(_shortest(way, first=6, last=6, keeping=True) for way in ways)
    again = min(_shortest(way, first=8, last=6, keeping=False)[0] for way in ways)
    if kept[0] <= again:
        return LayerCost(network.parameters, forward, kept[0], kept[1])
    return LayerCost(network.parameters, forward, again, 0)


@dataclass(frozen=True)
class _Product:
    """One stage of a route: some neighbouring cores merged.

    Attributes:
        size: Its multiplications per token.
        width: Features per token that go in.
        narrow: Whether these are kept for the backward pass (see `operator._Chain`): all that are
            no wider than half of x, and none of a route that has others.
    """

    size: int
    width: int
    narrow: bool


def _products(network: Network, backwards: bool) -> dict[tuple[int, int], _Product]:
    """The stage of every run of cores [begin, end), which is the same in all routes with it."""
    count = len(network.cores)
    found = {}
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            groups = tuple(size for size in (begin, end - begin, count - end) if size)
            stage = lower(network, Route(groups, backwards)).stages[1 if begin else 0]
            size = stage.b * stage.m * stage.k * stage.f
            narrow = not begin or 2 * stage.width <= network.in_features
            found[begin, end] = _Product(size, stage.width, narrow)
    return found


def _shortest(
    products: dict[tuple[int, int], _Product], *, first: int, last: int, keeping: bool
) -> tuple[int, int]:
    """The least weighted multiplications of all ways to group the cores, and what is kept then.

    Args:
        products: Of every run of cores.
        first: What a multiplication of all products but the last counts.
        last: Likewise of the last product.
        keeping: Go only through products whose inputs are kept.

    Returns:
        Operations and kept values per token.
    """
    count = max(end for _, end in products)
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, count + 1):
        weight = last if end == count else first
        ways = []
        for begin in range(end):
            product = products[begin, end]
            if keeping and not product.narrow:
                continue
            operations, values = best[begin]
            width = product.width if begin else 0
            ways.append((operations + weight * product.size, values + width))
        best.append(min(ways, default=(_NEVER, 0)))
    return best[count]


@dataclass(frozen=True)
class Payload:
    """Bytes that other parts of a run move for a number of parameters.

    Attributes:
        gradient_bytes: What an all-reduce or a gradient code sends per step.
        optimizer_bytes: The optimizer's state.
        checkpoint_bytes: Weights and optimizer state.
    """

    gradient_bytes: float
    optimizer_bytes: float
    checkpoint_bytes: float


def payload(
    parameters: float,
    *,
    gradient_bytes_per_value: float = 4.0,
    moments: int = 2,
    moment_bytes_per_value: float = 4.0,
    weight_bytes_per_value: float = 4.0,
) -> Payload:
    """Bytes of gradients, optimizer state and checkpoints; Adam in float32 unless said.

    Raises:
        TensorizeError: For negative numbers.
    """
    given = (parameters, gradient_bytes_per_value, moments, moment_bytes_per_value)
    if min(*given, weight_bytes_per_value) < 0:
        raise TensorizeError(f"a payload of {given} and {weight_bytes_per_value} bytes is below 0")
    optimizer = parameters * moments * moment_bytes_per_value
    return Payload(
        parameters * gradient_bytes_per_value,
        optimizer,
        optimizer + parameters * weight_bytes_per_value,
    )


def step_ratio(*, linear_share: float, flops_ratio: float, efficiency: float = 1.0) -> float:
    """Time of a training step over that of the dense model (Amdahl's law).

    Args:
        linear_share: Of the dense step, what the replaced layers take.
        flops_ratio: Their operations over those of the dense layers.
        efficiency: Operations per second that the narrower products reach, over those of the dense
            ones: 1 at d = 2048 and ranks down to d / 8, 0.73 to 0.9 at d <= 1024 (measured on one
            CPU thread).

    Raises:
        TensorizeError: For numbers out of range.
    """
    if not (0.0 <= linear_share <= 1.0 and flops_ratio >= 0.0 and efficiency > 0.0):
        raise TensorizeError(
            f"linear_share = {linear_share} must be in [0, 1], flops_ratio = {flops_ratio} at "
            f"least 0 and efficiency = {efficiency} above 0"
        )
    return 1.0 - linear_share + linear_share * flops_ratio / efficiency


@dataclass(frozen=True)
class LlamaShape:
    """A LLaMA model as low-rank papers size them: untied embedding and head, no biases.

    Attributes:
        hidden: Width.
        intermediate: Width between the linear layers of the feed-forward part.
        layers: Blocks.
        heads: Attention heads.
        vocabulary: Tokens.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 32_000

    @property
    def linears(self) -> tuple[tuple[int, int, int], ...]:
        """(in, out, how many) of the linear layers inside the blocks."""
        wide, narrow = self.intermediate, self.hidden
        return (
            (narrow, narrow, 4 * self.layers),
            (narrow, wide, 2 * self.layers),
            (wide, narrow, self.layers),
        )

    @property
    def other_parameters(self) -> int:
        """Embedding, head and norms."""
        return 2 * self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden


LLAMA = {
    "60M": LlamaShape(512, 1376, 8, 8),
    "130M": LlamaShape(768, 2048, 12, 12),
    "350M": LlamaShape(1024, 2736, 24, 16),
    "1B": LlamaShape(2048, 5461, 24, 32),
    "7B": LlamaShape(4096, 11008, 32, 32),
}
"""Shapes of arXiv 2403.03507 (GaLore), appendix; CoLA, SLTrain and LORO use the same."""


@dataclass(frozen=True)
class ModelCost:
    """A whole model.

    Attributes:
        parameters: All.
        linear_parameters: Of the layers in the blocks.
        training_flops_per_token: Linear layers, head and attention, forward and backward.
        linear_flops_per_token: Of the layers in the blocks, forward and backward.
    """

    parameters: int
    linear_parameters: int
    training_flops_per_token: int
    linear_flops_per_token: int


def llama_cost(
    shape: LlamaShape, form: str = "dense", fraction: float = 0.25, *, sequence: int = 256
) -> ModelCost:
    """Parameters and operations of a LLaMA model whose blocks' linear layers have a form.

    Attention takes 4 s d operations per token, layer and pass forward (scores and their use; a
    causal kernel that skips half takes half), which the backward pass doubles.

    Args:
        shape: See `LLAMA`.
        form: ``dense`` or a form of two factors.
        fraction: Rank over the narrower side of each layer, rounded to the nearest number.
        sequence: Tokens per sequence, s.

    Raises:
        TensorizeError: For another form or a fraction out of (0, 1].
    """
    if form not in ("dense", *TWO_FACTOR_FORMS):
        raise TensorizeError(
            f"form = {form!r} has no rank fraction: give layer_cost its rank layer by layer"
        )
    if not 0.0 < fraction <= 1.0:
        raise TensorizeError(f"fraction = {fraction} must be above 0 and at most 1")
    parameters = flops = 0
    for into, out, count in shape.linears:
        cost = layer_cost(form, into, out, max(1, round(fraction * min(into, out))))
        parameters += cost.parameters * count
        flops += cost.training_flops_per_token * count
    head = 6 * shape.vocabulary * shape.hidden
    attention = 3 * 4 * sequence * shape.hidden * shape.layers
    return ModelCost(
        parameters + shape.other_parameters, parameters, flops + head + attention, flops
    )
