"""Layers of two factors: plain, with a nonlinearity, with latent crossing, and plus sparse.

Latent crossing: low-rank layers that hand their narrow features to the next of their kind.

y_i = B_i (h_i + g_i h_{i-1}) with h_i = A_i x_i, or act(A_i x_i) (LaX, arXiv 2505.21732, equation
4). The layers of one kind, say all ``q_proj`` of a model, form a line; a layer leaves its h for the
next, which takes it away, so nothing outlives a forward pass. The first layer starts anew: several
micro-batches can be on their way.

Under activation checkpointing a block is run again when those after it have run long ago. What it
took then must be put back for it, which `latent_contexts` does::

    checkpoint(block, x, use_reentrant=False, context_fn=latent_contexts(model))
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": latent_contexts(model)}  # Hugging Face
    )

Limits: within a forward pass every layer of a line runs once and in order; a line does not cross
pipeline stages, so link the layers of each stage by themselves (and for the same mathematics with
another number of stages, the same groups of layers there); reentrant checkpointing is refused.

Low rank plus sparse: two factors and a few entries at random places (SLTrain).

W = alpha / r B A + S, where the places of S are drawn once and stay (Han et al. 2024, arXiv
2406.02214). Training has the operations of a dense layer and some more, since the weight is built
for every product; what is saved is memory: parameters, gradients and optimizer state of
r (in + out) + density in out numbers, and no activation but x is kept. A few tokens at a time, as
in generating text, go through the factors and the entries themselves and are cheap.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import (
    ACTIVATIONS,
    FEW,
    autocast_dtype,
    bottleneck,
    check_activation,
)
from outlast.tensorize.execute import has_values, no_autocast, transformed, without_autocast
from outlast.tensorize.initialize import activation_gain
from outlast.tensorize.layer import Factory, StructuredLinear
from outlast.tensorize.network import Network, one_rank
from outlast.tensorize.operator import chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def low_rank_network(in_features: int, out_features: int, rank: int) -> Network:
    """Give y = (x A^T) B^T with A of shape (rank, in) and B of shape (out, rank)."""
    sizes = (("i", in_features), ("r", rank), ("o", out_features))
    return Network("i", "o", ("ri", "or"), sizes, in_features, out_features)


class LowRankLinear(StructuredLinear):
    """y = (x A^T) B^T + b: two matrix products.

    The factors are those of the children ``down`` and ``up``, two `nn.Linear`, so that whatever
    replaces linear layers (float8, tensor parallelism, a guard) replaces these as well.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "low_rank"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        one_rank(rank, self.form)
        super().__init__(low_rank_network(in_features, out_features, rank))
        self.down = nn.Linear(in_features, rank, bias=False, **factory)
        self.up = nn.Linear(rank, out_features, bias=bias, **factory)
        self.reset_parameters()

    def factors(self) -> tuple[Tensor, ...]:
        """The weights of `down` and `up`."""
        return self.down.weight, self.up.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of `up`."""
        return self.up.bias

    def check_children(self) -> None:
        """Refuse to take the children's weights for all that they do.

        Raises:
            TensorizeError: One is no linear layer any more, as where LoRA wraps it.
        """
        for name, child in (("down", self.down), ("up", self.up)):
            if not isinstance(child, nn.Linear):
                raise TensorizeError(
                    f"{name} has become a {type(child).__name__}, which does more than multiply "
                    "with its weight: merge it first (merge_and_unload of adapters)"
                )

    def to_dense(self) -> Tensor:
        """The weight, of shape (out_features, in_features); exact and differentiable."""
        self.check_children()
        return super().to_dense()

    def _replaced(self) -> bool:
        """Return whether the children are no longer plain linear layers, or have hooks."""
        return any(
            type(item) is not nn.Linear
            or item._forward_hooks
            or item._forward_pre_hooks
            or item._backward_hooks
            or item._backward_pre_hooks
            or "forward" in item.__dict__
            for item in (self.down, self.up)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features), in the dtype of x."""
        if self._replaced():
            return self._by_children(x)
        if torch.compiler.is_compiling() or x.numel() <= FEW:
            # `nn.Linear` multiplies in one dtype.
            same = self.down.weight.dtype == self.up.weight.dtype == x.dtype
            if same or autocast_dtype(x) is not None:
                result: Tensor = self.up(self.down(x))
                return result
        bias = self.bias
        if bias is not None and autocast_dtype(x) is None:
            bias = bias.to(x.dtype)
        return chain(x, self.factors(), self.network, bias)

    def _by_children(self, x: Tensor, activation: str | None = None) -> Tensor:
        """As the children do it; stored in another dtype than x, each gets x in its own."""
        weights = [getattr(child, "weight", None) for child in (self.down, self.up)]
        # Something may hide the dtype that a factor is stored in.
        kinds = [
            weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None
            for weight in weights
        ]
        mixed = None not in kinds and {*kinds} != {x.dtype} and autocast_dtype(x) is None
        latent = self.down(x.to(kinds[0]) if mixed else x)
        latent = latent if activation is None else ACTIVATIONS[activation](latent)
        result: Tensor = self.up(latent.to(kinds[1]) if mixed else latent)
        return result.to(x.dtype) if mixed else result


class BottleneckLinear(LowRankLinear):
    """y = act(x A^T) B^T + b: low rank with a nonlinearity in the middle (Liu et al. 2025, CoLA).

    Not a linear map any more, so there is no `to_dense`; a dense layer is turned into one by
    distillation alone.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between.
        activation: ``silu``, ``gelu``, ``relu`` or ``tanh``.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "cola"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        activation: str = "silu",
        *,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        check_activation(activation)
        self.activation = activation
        super().__init__(in_features, out_features, rank, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        if self._replaced():
            return self._by_children(x, self.activation)
        return bottleneck(x, self.down.weight, self.up.weight, self.bias, self.activation)

    def to_dense(self) -> Tensor:
        """Refuse.

        Raises:
            TensorizeError: Always.
        """
        raise TensorizeError(
            f"a layer with {self.activation} between its factors is no matrix: export its two "
            "factors as they are, or use form = 'low_rank'"
        )

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw the factors anew; for x of unit variance y varies as after a weight of `std`."""
        super().reset_parameters(std, generator)
        self.up.weight.div_(activation_gain(self.activation))

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        return {**super().settings(), "activation": self.activation}

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"{super().extra_repr()}, activation={self.activation}"


Gate = Literal["identity", "scalar", "vector"]

GATES: tuple[Gate, ...] = get_args(Gate)


class LatentSlot:
    """Place in which a layer leaves its latent for the next.

    Attributes:
        latent: (..., rank), or None when it was taken or not yet left.
        learns: Whether the layer that left it is trained.
    """

    def __init__(self) -> None:
        self.latent: Tensor | None = None
        self.learns = False


class LatentLinear(LowRankLinear):
    """y = (h + g h_before) B^T + b with h = x A^T, h_before from the layer before in its line.

    Until `link_latents` puts it in a line it is a plain low-rank layer.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between.
        activation: What h goes through, a key of `ACTIVATIONS`; None: nothing.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.

    Attributes:
        gate: g, of shape (1,) or (rank,); None where g = 1 and in the first layer of a line.
    """

    form: ClassVar[str] = "lax"
    gate: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        activation: str | None = None,
        *,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        if activation is not None:
            check_activation(activation)
        self.activation = activation
        super().__init__(in_features, out_features, rank, bias=bias, **factory)
        self.register_parameter("gate", None)
        self._line: list[LatentSlot] = []
        self._taken: LatentSlot | None = None
        self._left: LatentSlot | None = None

    @property
    def is_linked(self) -> bool:
        """True if the layer is in a line with others."""
        return self._taken is not None or self._left is not None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features).

        Raises:
            TensorizeError: The layer before has not left its latent.
        """
        if self.activation is None and self._taken is None and self._left is None:
            return super().forward(x)
        h = self.down(x)
        if self.activation is not None:
            h = ACTIVATIONS[self.activation](h)
        if self._taken is None:
            # A forward pass that broke off may have left something.
            for slot in self._line:
                slot.latent = None
            crossed = h
        else:
            before = self._take(self._taken, h)
            crossed = h + (before if self.gate is None else self.gate.to(h.dtype) * before)
        if self._left is not None:
            self._left.latent = h
            self._left.learns = self.down.weight.requires_grad
        y: Tensor = self.up(crossed)
        return y

    def _take(self, slot: LatentSlot, h: Tensor) -> Tensor:
        before, slot.latent = slot.latent, None
        if before is None:
            raise TensorizeError(
                "a layer with latent crossing found nothing from the layer before it: under "
                "activation checkpointing pass context_fn=latent_contexts(model) with "
                "use_reentrant=False, in a pipeline link the layers of each stage by themselves, "
                "and run the layers of a line once each and in order"
            )
        if before.shape != h.shape:
            raise TensorizeError(
                f"latents of shapes {tuple(before.shape)} and {tuple(h.shape)} cannot be added: "
                "all layers of a line must see the same tokens and have the same rank"
            )
        if slot.learns and h.requires_grad and not before.requires_grad:
            raise TensorizeError(
                "the latent of a layer that learns came without gradients: checkpoint with "
                "use_reentrant=False, or freeze the layer's parameters"
            )
        return before

    def to_dense(self) -> Tensor:
        """The weight of a layer that stands alone, (out_features, in_features).

        Raises:
            TensorizeError: The layer is in a line or has an activation.
        """
        if self.activation is not None or self._taken is not None:
            raise TensorizeError(
                "a layer with latent crossing is no matrix: it depends on the layer before it; "
                "export its two factors as they are"
            )
        return super().to_dense()

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw the factors anew and set the gate to 1.

        For x of unit variance y varies as after a weight of `std`, but for the latent of the layer
        before, which adds its own variance.
        """
        super().reset_parameters(std, generator)
        if self.activation is not None:
            self.up.weight.div_(activation_gain(self.activation))
        gate = self._parameters.get("gate")
        if gate is not None:
            gate.fill_(1.0)

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer, which then is in no line."""
        return {**super().settings(), "activation": self.activation}

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        gate = "identity" if self.gate is None else f"{tuple(self.gate.shape)}"
        crossing = "unlinked or first" if self._taken is None else f"gate={gate}"
        return f"{super().extra_repr()}, activation={self.activation}, {crossing}"


def link_latents(layers: Iterable[LatentLinear], gate: Gate = "identity") -> None:
    """Put layers in a line: each takes the latent of the one before.

    Link before the optimizer is made and before a checkpoint is loaded: the gates are parameters.
    A layer that has a gate of this kind already keeps it.

    Args:
        layers: In the order in which the model runs them; one alone is taken out of its line.
        gate: What the latent of the layer before is multiplied with: nothing, a number per layer or
            one per latent feature; learned, and 1 in the beginning.

    Raises:
        TensorizeError: The ranks differ, a layer comes twice, or the gate is unknown.
    """
    line = list(layers)
    if gate not in GATES:
        raise TensorizeError(f"gate = {gate!r} is not one of {', '.join(GATES)}")
    ranks = {layer.down.out_features for layer in line}
    if len(ranks) > 1 or len(set(map(id, line))) < len(line):
        raise TensorizeError(
            f"the layers of a line must be different ones of one rank, not of ranks {sorted(ranks)}"
        )
    slots = [LatentSlot() for _ in line[1:]]
    for layer, taken, left in zip(line, [None, *slots], [*slots, None], strict=True):
        layer._taken, layer._left = taken, left
        layer._line = [] if taken else slots
        weight = layer.down.weight
        # FSDP2 takes no parameter without dimensions.
        size = 1 if gate == "scalar" else len(weight)
        if taken is None or gate == "identity":
            layer.gate = None
        elif layer.gate is None or len(layer.gate) != size:
            layer.gate = nn.Parameter(torch.ones(size, device=weight.device, dtype=weight.dtype))


def link_by_name(
    model: nn.Module, gate: Gate = "identity", *, among: Iterable[nn.Module] | None = None
) -> dict[str, list[str]]:
    """Put all `LatentLinear` of a model in lines of those whose names differ in numbers alone.

    Args:
        model: Its modules stand in the order in which they run.
        gate: See `link_latents`.
        among: Layers of which a line must have one; other lines stay as they are. None: all.

    Returns:
        The names of the layers of every such line, by what they share: ``layers.*.q_proj``. Layers
        of different ranks are in different lines.
    """
    lines: dict[tuple[str, int], dict[str, LatentLinear]] = defaultdict(dict)
    for name, module in model.named_modules():
        if isinstance(module, LatentLinear):
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            lines[pattern, module.down.out_features][name] = module
    if among is not None:
        new = set(map(id, among))
        lines = {
            key: line for key, line in lines.items() if not new.isdisjoint(map(id, line.values()))
        }
    for line in lines.values():
        link_latents(line.values(), gate)
    patterns = [pattern for pattern, _ in lines]
    return {
        pattern if patterns.count(pattern) == 1 else f"{pattern} (rank {rank})": list(line)
        for (pattern, rank), line in lines.items()
    }


def latent_contexts(
    model: nn.Module,
) -> Callable[[], tuple[contextlib.AbstractContextManager[None], ...]]:
    """The ``context_fn`` with which `torch.utils.checkpoint.checkpoint` finds latents again.

    A block keeps the latents that it was given, tokens x rank numbers for every line.

    Args:
        model: A model after its layers were linked.

    Returns:
        A function that gives the contexts of a block's first run and of its second.
    """
    layers = [module for module in model.modules() if isinstance(module, LatentLinear)]
    slots = [layer._left for layer in layers if layer._left is not None]

    @contextlib.contextmanager
    def remembering(given: list[Tensor | None]) -> Iterator[None]:
        given.extend(slot.latent for slot in slots)
        yield

    @contextlib.contextmanager
    def reminded(given: Sequence[Tensor | None]) -> Iterator[None]:
        now = [slot.latent for slot in slots]
        for slot, latent in zip(slots, given, strict=True):
            slot.latent = latent
        try:
            yield
        finally:
            for slot, latent in zip(slots, now, strict=True):
                slot.latent = latent

    def contexts() -> tuple[contextlib.AbstractContextManager[None], ...]:
        given: list[Tensor | None] = []
        return remembering(given), reminded(given)

    return contexts


# An entry that is gathered, multiplied and scattered takes about as long as this many operations
# of a matrix product.
_SCATTER = 400


class SparseLowRankLinear(LowRankLinear):
    """y = x (alpha / r B A + S)^T + b.

    The children ``down`` and ``up`` only hold the factors: they are never called, so hooks on them
    do not run and what takes their place must keep a `weight`.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features between the factors.
        density: Share of the weight's entries that S has.
        alpha: Scales the factors' product by alpha / rank; None: not.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.

    Attributes:
        values: (entries,) of S.
        alpha: As given.
        scale: alpha / r with the rank as it is now, or 1.
        indices: (entries,) their places in the flattened weight, ascending; a buffer.
    """

    form: ClassVar[str] = "sltrain"
    indices: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        density: float = 0.03,
        *,
        alpha: float | None = None,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        if not 0.0 < density <= 1.0:
            raise TensorizeError(f"density = {density} must be above 0 and at most 1")
        self.density = density
        self.alpha = alpha
        self.entries = max(1, round(density * in_features * out_features))
        super().__init__(in_features, out_features, rank, bias=bias, **factory)
        self.values = nn.Parameter(torch.empty(self.entries, **factory))
        small = in_features * out_features < 2**31
        kind = torch.int32 if small else torch.int64
        self.register_buffer("indices", torch.empty_like(self.values, dtype=kind))
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """Multiplier of the factors' product."""
        return 1.0 if self.alpha is None else self.alpha / self.network.size(self.network.bonds)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features).

        Raises:
            TensorizeError: A child is no linear layer any more: it would not be called.
        """
        self.check_children()
        dtype = autocast_dtype(x)
        if dtype is None:
            return self._multiply(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._multiply(x.to(dtype))

    def _multiply(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        factors = self.down.weight, self.up.weight, self.values
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if torch.compiler.is_compiling() or transformed():
            weight = _dense(*factors, self.indices, self.scale)
            y = functional.linear(rows, weight.to(x.dtype), bias)
        else:
            y = _SparseLowRank.apply(  # type: ignore[no-untyped-call]
                rows, *factors, self.indices, bias, self.scale
            )
        return y.view(*x.shape[:-1], self.out_features)

    def to_dense(self) -> Tensor:
        """The weight, of shape (out_features, in_features); exact and differentiable."""
        self.check_children()
        factors = self.down.weight, self.up.weight, self.values
        with no_autocast(self.values.device):
            return _dense(*factors, self.indices, self.scale)

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw factors, entries and their places anew.

        Args:
            std: Root mean square of the weight's entries, those of S being of this size, too; None:
                1 / sqrt(3 in_features), that of a new `nn.Linear`.
            generator: Where the numbers come from; None: torch's own.
        """
        if "indices" not in self._buffers:
            return
        std = 1 / math.sqrt(3 * self.in_features) if std is None else std
        share = self.entries / (self.in_features * self.out_features)
        super().reset_parameters(std * math.sqrt(1.0 - share) / self.scale, generator)
        self.values.normal_(0.0, std, generator=generator)
        if has_values(self.indices):
            size = self.in_features * self.out_features
            self.indices.copy_(_places(self.entries, size, self.indices.device, generator))

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer, whose entries then are at other places."""
        return {**super().settings(), "density": self.density, "alpha": self.alpha}

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        share = (self.network.parameters + self.entries) / (self.in_features * self.out_features)
        return (
            f"{self.in_features}, {self.out_features}, rank={self.rank}, density={self.density}, "
            f"bias={self.bias is not None}, {share:.1%} of the dense parameters"
        )


def _places(
    count: int, size: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """So many different numbers below `size`, ascending, all sets of them equally likely."""
    if 2 * count > size:
        chosen = torch.randperm(size, device=device, generator=generator)[:count]
        return chosen.sort().values
    # Without a permutation of all entries of a large weight.
    found = torch.empty(0, dtype=torch.int64, device=device)
    while found.numel() < count:
        more = torch.randint(size, (count,), device=device, generator=generator)
        found = torch.unique(torch.cat((found, more)))
    kept = torch.randperm(found.numel(), device=device, generator=generator)[:count]
    return found[kept].sort().values


def _dense(down: Tensor, up: Tensor, values: Tensor, indices: Tensor, scale: float) -> Tensor:
    """The weight; differentiable."""
    weight = up @ down if scale == 1.0 else (up * scale) @ down
    return weight.flatten().index_add(0, indices, values).view_as(weight)


def _is_split(tokens: int, down: Tensor, up: Tensor, values: Tensor) -> bool:
    """Return whether so few tokens are cheaper without building the weight."""
    rank, out, into = down.shape[0], up.shape[0], down.shape[1]
    split = tokens * (rank * (out + into) + _SCATTER * values.shape[0])
    return split < out * into * (rank + tokens)


class _SparseLowRank(Function):
    """Keeps x, the factors and the entries; the weight is built again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, down, up, values, indices, bias, scale = inputs
        ctx.save_for_backward(x, down, up, values, indices)
        ctx.scale, ctx.biased = scale, bias is not None
        if not _is_split(x.shape[0], down, up, values):
            weight = _dense(down, up, values, indices, scale).to(x.dtype)
            return functional.linear(x, weight, bias)
        down, up, values = down.to(x.dtype), up.to(x.dtype), values.to(x.dtype)
        row, column = _split_places(indices, down.shape[1])
        y = functional.linear(functional.linear(x, down).mul_(scale), up, bias)
        return y.index_add_(1, row, x.index_select(1, column).mul_(values))

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, down, up, values, indices = ctx.saved_tensors
        factors = down, up, values
        needs = ctx.needs_input_grad[:4]
        dx = ddown = dup = dvalues = None
        if torch.is_grad_enabled():
            # Gradients that have gradients themselves. Views, so that a factor which depends on x
            # does not count twice.
            own = [tensor.view_as(tensor) for tensor in (x, *factors)]
            weight = _dense(own[1], own[2], own[3], indices, ctx.scale)
            y = functional.linear(own[0], weight.to(x.dtype))
            wanted = [tensor for tensor, need in zip(own, needs, strict=True) if need]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            dx, ddown, dup, dvalues = (next(found) if need else None for need in needs)
        elif _is_split(x.shape[0], *factors):
            down, up, values = (factor.to(x.dtype) for factor in factors)
            row, column = _split_places(indices, down.shape[1])
            dh = (dy @ up).mul_(ctx.scale)
            of_row = dy.index_select(1, row)
            dx = (dh @ down).index_add_(1, column, of_row * values)
            given = (
                dh.t() @ x,
                (dy.t() @ functional.linear(x, down)).mul_(ctx.scale),
                (of_row * x.index_select(1, column)).sum(0),
            )
            ddown, dup, dvalues = (
                gradient.to(factor.dtype) for gradient, factor in zip(given, factors, strict=True)
            )
        else:
            if needs[0]:
                dx = dy @ _dense(*factors, indices, ctx.scale).to(x.dtype)
            if any(needs[1:]):
                dweight = (dy.t() @ x).to(down.dtype)
                ddown = (up.t() @ dweight).mul_(ctx.scale) if needs[1] else None
                dup = (dweight @ down.t()).mul_(ctx.scale) if needs[2] else None
                dvalues = dweight.flatten().index_select(0, indices) if needs[3] else None
        dbias = dy.sum(0) if ctx.biased and ctx.needs_input_grad[5] else None
        return dx, ddown, dup, dvalues, None, dbias, None


def _split_places(indices: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows and columns of places in a flattened weight."""
    row = torch.div(indices, columns, rounding_mode="floor")
    return row, indices - row * columns
