"""Patches of a module's ``forward`` and of functions, which copies of the model keep."""

from __future__ import annotations

import operator
import threading
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from torch import Tensor, nn

    from outlast.guard.watch import Watch


class ForwardPatch:
    """Replaces the `forward` of one module, by an attribute of the module itself.

    Args:
        watch: What all checks of the guard share.
        module: The module.
        name: Its name in the model.

    Attributes:
        suspended: Whether nothing is checked; see `suspended_checks`.
    """

    def __init__(self, watch: Watch, module: nn.Module, name: str) -> None:
        self.watch = watch
        self.module = module
        self.name = name
        self.suspended = False

    def trains(self, *tensors: Tensor | None) -> bool:
        """Return whether a call with these tensors is part of training; see `trains`."""
        return not self.suspended and trains(self.module, *tensors) and not is_transformed()

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
    """Return whether a call of `module` with these tensors is part of training.

    In evaluation mode, too, where a gradient goes through it: a layer may be set to ``.eval()`` for
    its dropout or statistics, and train.
    """
    return module.training or (
        torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    )


def is_transformed() -> bool:
    """Return whether ``torch.func`` or forward-mode differentiation sees what is computed now.

    Neither takes the guard's autograd functions; what they compute ends in torch's kernels, which
    `outlast.guard.operations` checks.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Thread(threading.local):
    suspended = False


_THREAD = _Thread()


@contextmanager
def suspended_checks(model: nn.Module) -> Iterator[None]:
    """Have nothing checked in this thread, for passes of `model` over meaningless numbers."""
    # What the guard has put into a module's dict: a patch's method, or checked products.
    put = (
        module.__dict__.get(name) for module in model.modules() for name in ("forward", "product")
    )
    patches: list[Any] = [
        owner for item in put if hasattr(owner := getattr(item, "__self__", item), "suspended")
    ]
    before, _THREAD.suspended = _THREAD.suspended, True
    checking = [patch for patch in patches if not patch.suspended]
    for patch in checking:
        patch.suspended = True
    try:
        yield
    finally:
        _THREAD.suspended = before
        for patch in checking:
            patch.suspended = False


def is_suspended() -> bool:
    """Return whether nothing is checked in this thread; see `suspended_checks`."""
    return _THREAD.suspended


class FunctionPatch:
    """A function that others look up in its module at every call, replaced while that is asked for.

    All that ask share one wrapper; the last of them is called, and the function comes back when
    none is left, in whatever order they leave.
    """

    def __init__(self, owner: ModuleType | type, name: str) -> None:
        self._owner = owner
        self._name = name
        # The garbage collector may run `_leave` in a thread that holds it: a guarded model is freed
        # as a cycle, and closes what it holds. So every step of a change leaves a sound state.
        self._lock = threading.RLock()
        self._asking: list[Callable[..., Any]] = []
        self._is_replaced = False
        self.original: Callable[..., Any] = getattr(owner, name)

    @contextmanager
    def by(self, stand_in: Callable[..., Any]) -> Iterator[None]:
        """Have ``stand_in(original, *args, **kwargs)`` called instead, in every thread."""
        with self._lock:
            self._asking.append(stand_in)
            if not self._is_replaced:
                self._is_replaced = True
                self.original = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._wrapper(self.original))
        try:
            yield
        finally:
            self._leave(stand_in)

    def prefer(self, stand_in: Callable[..., Any]) -> None:
        """Have this one of several called from now on."""
        with self._lock:
            # At no time without it, so that the function stays replaced.
            self._asking.append(stand_in)
            self._asking.remove(stand_in)

    def _leave(self, stand_in: Callable[..., Any]) -> None:
        with self._lock:
            self._asking.remove(stand_in)
            if self._is_replaced and not self._asking:
                self._is_replaced = False
                setattr(self._owner, self._name, self.original)

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        asking = self._asking

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not asking or is_suspended() or is_transformed():
                return original(*args, **kwargs)
            return asking[-1](original, *args, **kwargs)

        return wrapper
