"""The state and facts of a hand-written loop, and its progress."""

from __future__ import annotations

import decimal
import math
import numbers
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from outlast.autosave.program.source import RUNTIME
from outlast.errors import IntegrationError
from outlast.runtime.place import unwrapped
from outlast.runtime.recording import LoopFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer


class Progress:
    """Progress of a run, as an entry of its state: the same on all ranks.

    Attributes:
        step: Iterations of the loop that are done.
        epoch: Times that the loader has been gone through.
        count: Iterations done of this epoch.
        ranks: Processes that did them.
    """

    def __init__(self, ranks: int) -> None:
        self.step = self.epoch = self.count = 0
        self.ranks = ranks

    def state_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what was saved."""
        vars(self).update(state)


class OtherModule:
    """A module that no optimizer trains, such as averaged weights, as an entry of a state.

    The names of an optimizer's tensors are those of one module; this is none, but has its state.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrapped(module)

    def state_dict(self) -> dict[str, Any]:
        """The state of the module."""
        return self._module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self._module.load_state_dict(state)


def entries_of(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    own: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Entries of a state by name; several models are one entry, of which each is a part.

    Args:
        models: Those that the optimizers train.
        optimizers: One or more.
        own: Entries of the run itself.
        extra: Those that the script adds.

    Raises:
        IntegrationError: When an added entry has a name that is taken, or no state.
    """
    plain = {name: unwrapped(model) for name, model in models.items()}
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else [*optimizers]
    found = {
        **(plain if len(plain) == 1 else {"model": nn.ModuleDict(plain)}),
        "optimizer": optimizer,
        **own,
    }
    for name, item in extra.items():
        if name in found:
            raise IntegrationError(f"state[{name!r}] is a name of the run's own; rename it")
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise IntegrationError(
                f"state[{name!r}] is a {type(item).__name__}, which has no state_dict and "
                "load_state_dict; give it both, or put it into an object that has them"
            )
        found[name] = OtherModule(item) if isinstance(item, nn.Module) else item
    return found


def facts_of(
    models: Iterable[nn.Module],
    loader: Iterable[Any],
    ranks: int,
    iterations: tuple[int, int | None],
    tokens_per_step: int,
) -> LoopFacts:
    """Facts that the records tell of the loop before its first step.

    Args:
        models: Those that are trained.
        loader: What it goes through.
        ranks: Processes.
        iterations: Epochs, and steps after which it ends or None.
        tokens_per_step: Over all processes; 0: not known.
    """
    epochs, steps = iterations
    batch = getattr(loader, "batch_size", None) or 0
    total = length_of(loader) * epochs
    parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
    return LoopFacts(
        framework="pytorch",
        steps=min(total or steps or 0, steps or total),
        samples_per_step=batch * ranks,
        tokens_per_step=tokens_per_step,
        parameters=sum(parameter.numel() for parameter in parameters.values()),
    )


def number_in(value: Any) -> torch.Tensor | float | None:
    """A figure as it is now, without waiting for the device that computes it.

    Args:
        value: A number of Python or NumPy, or a tensor or array of one element.

    Returns:
        None for everything else.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        if value.device.type != "cpu":
            return value.detach().clone()
        return float(value.item())
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real | decimal.Decimal) else None


def held(name: str, value: Any) -> torch.Tensor | float:
    """As `number_in`, for what must be a number.

    Args:
        name: For the error.
        value: The figure.

    Raises:
        IntegrationError: When it is not one real number.
    """
    found = number_in(value)
    if found is not None:
        return found
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        raise IntegrationError(
            f"{name} has the shape {tuple(shape)}, but is one number; give its mean"
        )
    raise IntegrationError(
        f"{name} = {value!r:.80} is a {type(value).__name__}, but run.log takes numbers; log what "
        "can be measured, and print the rest"
    )


def refuse_two_savers() -> None:
    """Refuse a program that `outlast run` saves already.

    Raises:
        IntegrationError: When it does.
    """
    # It is there as the program's own main module; whoever makes the run may be any other.
    if hasattr(sys.modules["__main__"], RUNTIME):
        raise IntegrationError(
            "outlast.Run and `outlast run` would both save this script; start it with python, in a "
            "chain by slurm.command, or leave outlast.Run out"
        )


def length_of(loader: Iterable[Any]) -> int:
    """Items of a loader; 0 where that is not known."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        # A DataLoader of a stream has a length that it does not know.
        return 0


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a sampler or a stream which epoch it is, as `DistributedSampler` asks for."""
    for name in ("sampler", "batch_sampler", "", "dataset"):
        owner = getattr(loader, name, None) if name else loader
        if callable(tell := getattr(owner, "set_epoch", None)):
            tell(epoch)
            return
