"""Lightning's optimizer steps with forward and backward before them, not within."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer


def closures_first(trainer: Trainer) -> Callable[[], None]:
    """Let the trainer call ``closure()`` and then ``optimizer.step()``, as the guard needs it.

    Lightning calls ``optimizer.step(closure)``, in which an optimizer computes the gradients first,
    with the same result; only LBFGS does it several times. A gradient scaler does so already.

    Returns:
        Undoes it.
    """
    precision = trainer.precision_plugin
    if getattr(precision, "scaler", None) is not None:
        return lambda: None
    within = precision.optimizer_step

    def step(optimizer: Any, model: Any, closure: Callable[[], Any], **more: Any) -> Any:
        if isinstance(optimizer, LBFGS):
            return within(optimizer, model, closure, **more)
        result = precision._wrap_closure(model, optimizer, closure)
        optimizer.step(**more)
        return result

    precision.optimizer_step = step
    return lambda: vars(precision).pop("optimizer_step", None)
