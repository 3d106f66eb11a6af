"""Giving up the computation of a chunk between two layers, when its result is no longer wanted."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from torch.utils.hooks import RemovableHandle


class Abandoned(Exception):  # noqa: N818 - a way out, not an error
    """Leaves a forward or backward pass; caught where the chunk was begun."""


class Interrupt:
    """Asks between layers whether to go on.

    The question is put before each layer's forward pass and after each parameter's gradient, so a
    slow process learns within a layer's time that the others have done its work. It is never put
    inside a compiled module, and outside `listening` it costs a check of a flag.

    Args:
        model: Its layers are the elements of module lists and sequences, or, where it has none, its
            modules without children.
        unwanted: Whether the result is no longer wanted.
    """

    def __init__(self, model: nn.Module, unwanted: Callable[[], bool]) -> None:
        self._question = _Question(unwanted)
        self._handles: list[RemovableHandle] = []
        for layer in _layers(model):
            self._handles.append(layer.register_forward_pre_hook(self._question))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(self._question)  # type: ignore[no-untyped-call]
                )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Ask while the context is open.

        Raises:
            Abandoned: Out of the pass in it, when the result is unwanted.
        """
        self._question.asked = True
        try:
            yield
        finally:
            self._question.asked = False

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Question:
    """The hook; a copy of it, in a copied or saved model, asks nothing."""

    def __init__(self, unwanted: Callable[[], bool] | None = None) -> None:
        self._unwanted = unwanted
        self.asked = False

    def __call__(self, *arguments: Any) -> None:
        if self.asked and self._unwanted is not None and self._unwanted():
            raise Abandoned

    def __reduce__(self) -> tuple[type[_Question], tuple[()]]:
        return (_Question, ())


def _layers(model: nn.Module) -> list[nn.Module]:
    # A hook inside a compiled graph would be traced into it.
    inside = {
        id(child)
        for module in model.modules()
        if _is_compiled(module)
        for child in module.modules()
    }
    modules = [module for module in model.modules() if id(module) not in inside]
    layers = [
        layer
        for module in modules
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for layer in module
        if id(layer) not in inside
    ]
    return layers or [module for module in modules if not any(module.children())]


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module) gives a wrapper, module.compile() changes the module's call.
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
