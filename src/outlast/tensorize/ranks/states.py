"""What optimizers hold of a core, in the new coordinates of a bond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.ranks.coordinates import along

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.tensorize.ranks.spectrum import Cut

# Means and sums of squares, of the Adams, Adagrad, RMSprop and Adadelta.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta"})
# Absolute sizes, of Adamax and Rprop.
_SIZES = frozenset({"exp_inf", "step_size"})
# Averages of the parameter itself, of ASGD.
_VALUES = frozenset({"ax"})


@dataclass(frozen=True)
class Moved:
    """How a core and its gradient go to new coordinates.

    Attributes:
        letters: The core's, in the layer's network.
        at: The bond.
        way: (batch..., r, r') for the core.
        back: (batch..., r, r') for its gradient.
    """

    letters: str
    at: Cut
    way: Tensor
    back: Tensor

    def value(self, core: Tensor) -> Tensor:
        """The core in the new coordinates."""
        return along(core, self.letters, self.at, self.way)

    def state(self, key: str, value: Tensor) -> Tensor:
        """An optimizer's state of the shape of the core; what is not known is like a gradient."""
        back = self.way if key in _VALUES else self.back
        if key in _SQUARES:
            back = back.square()
        elif key in _SIZES:
            back = back.abs()
        return along(value, self.letters, self.at, back)


def check_states(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that hold something of a core that cannot be mapped.

    Raises:
        TensorizeError: Naming the optimizer and the state.
    """
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            for key, value in optimizer.state.get(parameter, {}).items():
                for tensor in _tensors(value):
                    nested = tensor is not value
                    if tensor.numel() > 1 and (nested or tensor.shape != parameter.shape):
                        raise TensorizeError(
                            f"{type(optimizer).__name__} holds {key!r} of shape "
                            f"{tuple(tensor.shape)} for a factor of shape "
                            f"{tuple(parameter.shape)}, which cannot follow a change of rank: "
                            "clear the optimizer's state or take AdamW, SGD or UnfoldedMuon for "
                            "factors"
                        )


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def exchange(
    optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter, moved: Moved
) -> None:
    """Put a parameter in the place of another, with its states in the new coordinates.

    An optimizer that keeps more of its parameters than torch's do is told of it, if it has a method
    ``exchange`` that takes pairs (old, new).
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                new if parameter is old else parameter for parameter in group["params"]
            ]
        told = getattr(optimizer, "exchange", None)
        if callable(told):
            told([(old, new)])
        state = optimizer.state.pop(old, None)
        if state is None:
            continue
        optimizer.state[new] = {
            key: moved.state(key, value)
            if isinstance(value, torch.Tensor) and value.shape == old.shape
            else value
            for key, value in state.items()
        }
