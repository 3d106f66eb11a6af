"""A lost pipeline stage filled from the stages beside it: another run, not the same one.

Where nobody has a stage's state any more, and no checkpoint does, training need not begin anew:
neighbouring stages of a transformer are much alike. The lost one's weights become the mean of
both neighbours' weights, each weighted by the squared norm of its last gradient, so that the
stage that still learns more counts more::

    W_s = (w_before W_before + w_after W_after) / (w_before + w_after),   w = |gradient|^2

(Blagoev, Ersoy and Chen, "All is not lost: LLM recovery without checkpoints", arXiv 2506.15461,
CheckFree; the paper also raises the learning rate to 1.1 times, which is left to the caller.) The
moments of the optimizer are lost and begin at zero. The first and the last stage have one
neighbour only and hold the embedding and the head: they cannot be filled so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from outlast.errors import RecoverError


def fill_lost_layers(
    state: Mapping[str, Tensor],
    lost: range,
    squared_gradients: tuple[float, float],
    *,
    prefix: str = "model.layers.",
) -> dict[str, Tensor]:
    """The approximate weights of a lost stage's layers.

    Args:
        state: The model's state dict, at least of as many layers before and after as are lost.
        lost: The numbers of the lost layers.
        squared_gradients: Squared gradient norms of the stages before and after, over the same
            layers that are averaged.
        prefix: What comes before a layer's number in the names.

    Returns:
        New tensors by name, of the neighbours' types; the k-th layer is the mean of the k-th layers
        of both neighbours.

    Raises:
        RecoverError: A neighbour is missing or unlike, or the gradients say nothing.
    """
    count = len(lost)
    before = _layers(state, range(lost.start - count, lost.start), prefix)
    after = _layers(state, range(lost.stop, lost.stop + count), prefix)
    if not before or before.keys() != after.keys():
        raise RecoverError(
            f"layers {lost.start} to {lost.stop - 1} cannot be filled from their neighbours: it "
            f"takes the same {count} layers of the same kind on both sides, "
            "which the first and the last stage do not have"
        )
    share = _share(*squared_gradients)
    return {
        f"{prefix}{lost.start + name[0]}.{name[1]}": _mean(name, tensor, after[name], share)
        for name, tensor in before.items()
    }


def _layers(
    state: Mapping[str, Tensor], layers: range, prefix: str
) -> dict[tuple[int, str], Tensor]:
    """The tensors of some layers by the layer's place among them and the rest of the name."""
    found: dict[tuple[int, str], Tensor] = {}
    for name, tensor in state.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal() and int(number) in layers:
            found[int(number) - layers.start, rest] = tensor
    return found if {layer for layer, _ in found} == set(range(len(layers))) else {}


def _share(before: float, after: float) -> float:
    """What the stage before counts."""
    total = before + after
    if not (math.isfinite(total) and before >= 0 and after >= 0 and total > 0):
        raise RecoverError(
            f"squared gradient norms of {before:g} and {after:g} give no weights for a mean: "
            "take those of a step that went well"
        )
    return before / total


def _mean(name: tuple[int, str], before: Tensor, after: Tensor, share: float) -> Tensor:
    if before.shape != after.shape or before.dtype != after.dtype:
        raise RecoverError(
            f"{name[1]} is {tuple(before.shape)} ({before.dtype}) before the lost stage and "
            f"{tuple(after.shape)} ({after.dtype}) after it: such stages have no mean"
        )
    if not before.is_floating_point():
        if not torch.equal(before, after):
            raise RecoverError(f"{name[1]} is of whole numbers that differ: they have no mean")
        return before.clone()
    return torch.lerp(after.double(), before.double(), share).to(before.dtype)
