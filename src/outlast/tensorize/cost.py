"""What structured layers cost and save, as pure functions of their settings; needs no torch.

The planner of the whole system composes these: parameters, floating-point operations, bytes that
are kept and sent, and how a training step shrinks. What a rank costs in quality is in
`outlast.tensorize.quality`. Operations count a multiplication and an addition as two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outlast.errors import TensorizeError
from outlast.tensorize.shapes import (
    balanced_modes,
    block_modes,
    bond_ranks,
    monarch_modes,
    monarch_rank,
)

TWO_FACTOR_FORMS = ("low_rank", "cola", "lax")
"""Two matrices with `rank` features between them; what is put between differs."""

FORMS = ("dense", *TWO_FACTOR_FORMS, "tt", "ttm", "btt", "monarch", "cp", "tucker", "sltrain")
"""Forms of which the cost is known."""

SLTRAIN_DENSITY = 0.03
"""Share of entries in the sparse part of low rank + sparse (arXiv 2406.02214, section 5)."""


@dataclass(frozen=True)
class LayerCost:
    """One layer.

    Attributes:
        parameters: Numbers that are learned, without the bias.
        forward_flops_per_token: Of two products of merged cores, cut where that is cheapest; or of
            the rebuilt dense weight, if that is cheaper. Merging, which does not depend on the
            tokens, is left out.
        training_flops_per_token: Forward and backward.
        kept_values_per_token: What is kept for the backward pass beyond x.
    """

    parameters: int
    forward_flops_per_token: int
    training_flops_per_token: int
    kept_values_per_token: int

    def kept_bytes(self, tokens: int, bytes_per_value: float = 2.0) -> float:
        """What `tokens` tokens keep beyond x."""
        return self.kept_values_per_token * tokens * bytes_per_value


@dataclass(frozen=True)
class _Cut:
    """Two products of (in, width) and (width, out) kind: operations of each, and what is between.

    Attributes:
        first: Multiplications of the first product, per token.
        second: Of the second.
        width: Features between.
        kept: Whether what is between is kept for the backward pass (see `operator._Chain`).
    """

    first: int
    second: int
    width: int
    kept: bool

    @property
    def forward(self) -> int:
        return 2 * (self.first + self.second)

    @property
    def training(self) -> int:
        # The gradients of both factors and of x take as much each; what was not kept comes again.
        return 3 * self.forward + (0 if self.kept else 2 * self.first)


def layer_cost(
    form: str, in_features: int, out_features: int, rank: int = 0, *, cores: int = 3
) -> LayerCost:
    """What a layer costs.

    Args:
        form: One of `FORMS`.
        in_features: Features of x.
        out_features: Features of y.
        rank: Of low-rank factors, of all bonds, of blocks, or the number of terms (``cp``); the
            number of blocks of ``monarch``. ``dense`` needs none.
        cores: Modes on each side of ``tt`` and ``ttm``, ``cp`` and ``tucker``.

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
    parameters, cuts = _described(form, in_features, out_features, rank, cores)
    best = min(cuts, key=lambda cut: cut.training)
    if form not in TWO_FACTOR_FORMS and best.training > 6 * dense:
        return LayerCost(parameters, 2 * dense, 6 * dense, 0)
    return LayerCost(parameters, best.forward, best.training, best.width if best.kept else 0)


def _described(
    form: str, in_features: int, out_features: int, rank: int, cores: int
) -> tuple[int, list[_Cut]]:
    """Parameters of a form, and the ways to compute it by two products."""
    dense = in_features * out_features
    if form in TWO_FACTOR_FORMS:
        cut = _two_factors(in_features, out_features, rank, keep=True)
        return rank * (in_features + out_features), [cut]
    if form == "sltrain":
        # Its weight is rebuilt at each use.
        rebuilt = _Cut(dense, 0, 0, kept=True)
        sparse = round(SLTRAIN_DENSITY * dense)
        return rank * (in_features + out_features) + sparse, [rebuilt]
    if form in ("btt", "monarch"):
        if form == "btt":
            (m, i), (n, o) = block_modes(in_features, out_features)
        else:
            (m, i), (n, o) = monarch_modes(in_features, out_features, rank)
            rank = monarch_rank(in_features, out_features, rank)
        first, second = m * n * rank * i, n * o * m * rank
        return first + second, [_Cut(first, second, m * n * rank, kept=False)]
    into, out = balanced_modes(in_features, cores), balanced_modes(out_features, cores)
    if form == "cp":
        return rank * sum(into + out), [_two_factors(in_features, out_features, rank)]
    if form == "tucker":
        return _tucker(in_features, out_features, rank, into + out)
    if form == "tt":
        modes = (*into, *out)
        bonds = (1, *bond_ranks(rank, modes), 1)
        parameters = sum(bonds[place] * mode * bonds[place + 1] for place, mode in enumerate(modes))
        return parameters, [_two_factors(in_features, out_features, bonds[cores])]
    pairs = [a * b for a, b in zip(into, out, strict=True)]
    bonds = (1, *bond_ranks(rank, pairs), 1)
    parameters = sum(bonds[place] * pair * bonds[place + 1] for place, pair in enumerate(pairs))
    return parameters, [_matrix_cut(into, out, bonds[cut], cut) for cut in range(1, cores)] or [
        _Cut(dense, 0, 0, kept=True)
    ]


def _two_factors(in_features: int, out_features: int, rank: int, *, keep: bool = False) -> _Cut:
    kept = keep or 2 * rank <= in_features
    return _Cut(in_features * rank, rank * out_features, rank, kept)


def _tucker(
    in_features: int, out_features: int, rank: int, modes: tuple[int, ...]
) -> tuple[int, list[_Cut]]:
    """Every mode has a factor of at most `rank` columns; the core joins them all."""
    ranks = [min(rank, mode) for mode in modes]
    half = len(modes) // 2
    core = math.prod(ranks)
    parameters = core + sum(a * b for a, b in zip(ranks, modes, strict=True))
    narrow = min(math.prod(ranks[:half]), math.prod(ranks[half:]))
    return parameters, [_two_factors(in_features, out_features, narrow)]


def _matrix_cut(into: tuple[int, ...], out: tuple[int, ...], bond: int, cut: int) -> _Cut:
    """A tensor-train matrix cut after some of its cores."""
    rest = math.prod(into[cut:])
    begun = math.prod(out[:cut]) * bond
    first = math.prod(into[:cut]) * begun * rest
    second = rest * math.prod(out[cut:]) * begun
    width = begun * rest
    return _Cut(first, second, width, 2 * width <= math.prod(into))


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
