"""What stands in for a module's ``forward``, and what becomes of it in copies of the model."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from outlast.guard.watch import Watch


class StandIn:
    """Whose `forward` stands in for that of one module, as an attribute of the module itself.

    Args:
        watch: What all checks of the guard share.
        module: The module.
        name: Its name in the model.

    Attributes:
        away: Whether passes over meaningless numbers run, in which nothing is checked.
    """

    def __init__(self, watch: Watch, module: nn.Module, name: str) -> None:
        self.watch = watch
        self.module = module
        self.name = name
        self.away = False

    def trains(self, *tensors: Tensor | None) -> bool:
        """Whether a call with these tensors is part of training; see `trains`."""
        return not self.away and trains(self.module, *tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Of a copied model: watched together with its original, under the same names."""
        copied = memo.get(id(self.module))
        return self if copied is None else type(self)(self.watch, copied, self.name)

    def __reduce__(self) -> tuple[object, ...]:
        """A pickled model is one without a guard: the module stands for its checks.

        Its `forward`, which is all that a model refers to, is then the class's own.
        """
        return operator.itemgetter(0), ((self.module,),)


def trains(module: nn.Module, *tensors: Tensor | None) -> bool:
    """Whether a call of `module` with these tensors is part of training.

    In evaluation mode, too, where a gradient goes through it: a layer may be set to ``.eval()`` for
    its dropout or statistics, and train.
    """
    return module.training or (
        torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    )
