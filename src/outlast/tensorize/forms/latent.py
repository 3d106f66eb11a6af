"""Latent crossing: low-rank layers that hand their narrow features to the next of their kind.

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
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.forms.low_rank import LowRankLinear
from outlast.tensorize.initialize import activation_gain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

Gate = Literal["identity", "scalar", "vector"]
GATES: tuple[Gate, ...] = ("identity", "scalar", "vector")


class Slot:
    """Where a layer leaves its latent for the next.

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation is not None and activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise TensorizeError(f"activation = {activation!r} is not one of {known}")
        self.activation = activation
        super().__init__(in_features, out_features, rank, bias=bias, device=device, dtype=dtype)
        self.register_parameter("gate", None)
        self._line: list[Slot] = []
        self._taken: Slot | None = None
        self._left: Slot | None = None

    @property
    def is_linked(self) -> bool:
        """Whether the layer is in a line with others."""
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

    def _take(self, slot: Slot, h: Tensor) -> Tensor:
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
        """What `print` shows."""
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
    shapes: dict[str, Callable[[int], tuple[int, ...]] | None] = {
        "identity": None,
        "scalar": lambda rank: (1,),  # FSDP2 takes no parameter without dimensions
        "vector": lambda rank: (rank,),
    }
    if gate not in shapes:
        raise TensorizeError(f"gate = {gate!r} is not one of {', '.join(shapes)}")
    ranks = {layer.down.out_features for layer in line}
    if len(ranks) > 1 or len(set(map(id, line))) < len(line):
        raise TensorizeError(
            f"the layers of a line must be different ones of one rank, not of ranks {sorted(ranks)}"
        )
    slots = [Slot() for _ in line[1:]]
    shape = shapes[gate]
    for layer, taken, left in zip(line, [None, *slots], [*slots, None], strict=True):
        layer._taken, layer._left = taken, left
        layer._line = [] if taken else slots
        weight = layer.down.weight
        if taken is None or shape is None:
            layer.gate = None
        else:
            size = shape(weight.shape[0])
            if layer.gate is not None and layer.gate.shape == size:
                continue
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

    def contexts() -> tuple[contextlib.AbstractContextManager[None], ...]:
        given: list[Tensor | None] = []
        return _remembering(slots, given), _reminded(slots, given)

    return contexts


@contextlib.contextmanager
def _remembering(slots: Sequence[Slot], given: list[Tensor | None]) -> Iterator[None]:
    given.extend(slot.latent for slot in slots)
    yield


@contextlib.contextmanager
def _reminded(slots: Sequence[Slot], given: Sequence[Tensor | None]) -> Iterator[None]:
    now = [slot.latent for slot in slots]
    for slot, latent in zip(slots, given, strict=True):
        slot.latent = latent
    try:
        yield
    finally:
        for slot, latent in zip(slots, now, strict=True):
            slot.latent = latent
