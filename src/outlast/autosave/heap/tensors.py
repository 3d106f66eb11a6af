"""Tensors and arrays: their blocks of memory, gradients, attributes and parametrized classes.

*Gradients.* Many loops leave the gradients of the last step lying until the next one sets them to
None or to zero. These need not be saved. In the first iterations of a loop every access to a
gradient is watched: one whose first use after the head of the loop was, each time, to be dropped or
zeroed as it lay there is dead at the head of this loop. One that is read or added to first is not,
as in the middle of an accumulation.

What was done so far is no proof of what will be. After a restore the gradients that were not saved
are watched until they have been set anew; whoever asks for one before is told, and the run stops.

*Parametrized classes.* `torch.nn.utils.parametrize` makes a class for one module, which has no name
that another process could find; it is made again from the class before and the names of the tensors
that it computes.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from outlast.autosave.heap.objects import Content, flat, own_attributes, pairs, put_own_attributes
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


_GRADIENT: Any = torch._C.TensorBase.grad
"""The attribute itself, whoever watches it on `torch.Tensor`."""


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of leaves, each a dictionary of hooks or None."""


class Gradient(enum.Enum):
    """Stands for a gradient that is not saved, since the program loses it before it reads it.

    DROPPED: it will be set to None. ZEROED: it will be filled with zeros.
    """

    DROPPED = enum.auto()
    ZEROED = enum.auto()


def plain_gradient(value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of any tensor, unwatched."""
    found: torch.Tensor | None = _GRADIENT.__get__(value)
    return found


def gradient(value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf; None of other tensors."""
    return plain_gradient(value) if value.is_leaf else None


def set_gradient(value: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set the gradient of a leaf, be it that of the size it had before it got another."""
    if grad is None or (grad.shape, grad.dtype) == (value.shape, value.dtype):
        _GRADIENT.__set__(value, grad)
        return
    numbers = value.data
    value.data = torch.empty_like(grad)
    _GRADIENT.__set__(value, grad)
    value.data = numbers


def hooks_of(value: Any) -> tuple[Any, ...]:
    """The dictionaries of a leaf's hooks, None for each that there is not; nothing of others."""
    return tuple(getattr(value, hook) for hook in HOOKS) if value.is_leaf else ()


def set_hooks(value: Any, hooks: tuple[Any, ...]) -> None:
    """Give a leaf the dictionaries of hooks that `hooks_of` gave."""
    for name, hook in zip(HOOKS, hooks, strict=False):
        if getattr(value, name) is not hook:
            setattr(value, name, hook)


def is_composed(value: torch.Tensor) -> bool:
    """Return True if a tensor is made of others, as a `DTensor` is of its local part."""
    return hasattr(value, "__tensor_flatten__")


def has_storage(value: torch.Tensor) -> bool:
    """Return True if a tensor lies in a storage of its own kind, as strides say."""
    strided = value.layout == torch.strided and value.device.type != "meta"
    return strided and not is_composed(value) and not is_lazy(value)


def of_tensor(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """References of a tensor."""
    grad = gradient(value)
    if grad is not None:
        yield ".%s", "grad", grad
    for name, hooks in zip(HOOKS, hooks_of(value), strict=False):
        if hooks is not None:
            yield ".%s", name, hooks
    if is_composed(value):
        names, context = value.__tensor_flatten__()
        yield from ((".%s", name, getattr(value, name)) for name in names)
        yield ".%s", "__context__", context
    yield from ((".%s", name, attribute) for name, attribute in own_attributes(value).items())


def tensor_content(value: Any) -> Content:
    """Content of a tensor beside the numbers in its storage."""
    whole = None
    if value.layout != torch.strided and not is_composed(value):
        whole = value.detach()
    return Content(
        "tensor",
        (value.requires_grad, gradient(value), whole, *hooks_of(value)),
        flat(own_attributes(value)),
    )


def tensor_put(value: Any, seen: Content) -> None:
    """Put back what a tensor held; a gradient that was not saved is None or zero."""
    requires_grad, grad, whole, *hooks = seen.items
    if whole is not None:
        value.data = whole
    if value.is_leaf:
        value.requires_grad_(requires_grad)
        if grad is Gradient.ZEROED:
            grad = torch.zeros_like(value, requires_grad=False)
        set_gradient(value, None if grad is Gradient.DROPPED else grad)
        set_hooks(value, tuple(hooks))
    put_own_attributes(value, dict(pairs(seen.attributes)))


def of_array(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """References of an array: objects, if it holds objects."""
    if value.dtype.hasobject:
        yield from (("[%d]", place, item) for place, item in enumerate(value.flat))
    yield from ((".%s", name, attribute) for name, attribute in own_attributes(value).items())


def array_content(value: Any) -> Content:
    """Content of an array beside numbers in a block of memory."""
    items: tuple[Any, ...] = ()
    if value.dtype.hasobject:
        items = tuple(value.flat)
    elif value.flags.writeable and not is_block(value):
        items = (np.array(value),)
    return Content("array", items, flat(own_attributes(value)))


def array_put(value: Any, seen: Content) -> None:
    """Put back what an array held."""
    if seen.items and value.flags.writeable:
        if value.dtype.hasobject:
            for place, item in enumerate(seen.items):
                value.flat[place] = item
        else:
            np.copyto(value, seen.items[0])
    put_own_attributes(value, dict(pairs(seen.attributes)))


def is_block(value: np.ndarray) -> bool:
    """Return True if the numbers of an array lie in one writable piece of memory."""
    return not value.dtype.hasobject and owner_of(value).flags.forc


def owner_of(value: np.ndarray) -> np.ndarray:
    """The array whose memory another one looks at, perhaps itself."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


class Geometry(NamedTuple):
    """Position, shape and strides of a tensor or an array in a block of memory.

    Attributes:
        block: Name of the block, or its address in this process.
        dtype: Of the elements.
        size: Length of each dimension.
        stride: Elements, of arrays bytes, from one to the next in each dimension.
        offset: Elements, of arrays bytes, from the start of the block.
        device: Where the block is.
    """

    block: str
    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str


def lies_in_block(value: Any) -> bool:
    """Return True for a tensor or an array whose numbers lie in a block of memory."""
    if isinstance(value, torch.Tensor):
        return has_storage(value)
    return isinstance(value, np.ndarray) and value.flags.writeable and is_block(value)


def geometry(value: Any) -> Geometry:
    """Geometry of a tensor or an array; the block is given by its address."""
    if isinstance(value, torch.Tensor):
        device, stride = str(value.device), tuple(value.stride())
        block = _address(value.untyped_storage(), device)
        return Geometry(
            block, value.dtype, tuple(value.shape), stride, int(value.storage_offset()), device
        )
    owner = owner_of(value)
    base: Any = owner.base
    if isinstance(base, torch.Tensor):
        storage = base.untyped_storage()
        start, block = storage.data_ptr(), _address(storage, "cpu")
    else:
        start = owner.__array_interface__["data"][0]
        block = f"cpu:{start}:{owner.nbytes}"
    offset = value.__array_interface__["data"][0] - start
    return Geometry(block, value.dtype, value.shape, value.strides, offset, "cpu")


def row_of(value: Any) -> torch.Tensor:
    """The whole block that a tensor or an array looks at, as one row.

    Of the dtype of `value`, where torch has it and the block holds whole elements; else bytes.
    """
    if isinstance(value, torch.Tensor):
        return _storage_row(value.untyped_storage(), value)
    owner = owner_of(value)
    base: Any = owner.base
    if isinstance(base, torch.Tensor):
        return _storage_row(base.untyped_storage(), base)
    line = owner.ravel(order="K")
    try:
        return torch.from_numpy(line)
    except TypeError:
        return torch.from_numpy(line.view(np.uint8))


def _storage_row(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    whole = storage.nbytes() % like.element_size() == 0 and not like.is_quantized
    dtype = like.dtype if whole else torch.uint8
    length = storage.nbytes() // (like.element_size() if whole else 1)
    return torch.empty(0, dtype=dtype, device=like.device).set_(storage, 0, (length,), (1,))


def _address(storage: torch.UntypedStorage, device: str) -> str:
    return f"{device}:{storage.data_ptr()}:{storage.nbytes()}"


class Blocks:
    """Names the blocks of a capture.

    Args:
        tensors: Where the blocks are listed when they are first looked at.
        known: Address to name of blocks that set-up makes in every process.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], known: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = dict(known)
        self._later = 0

    def place(self, value: Any) -> Geometry:
        """Geometry of a tensor or an array in its block, which is listed from now on."""
        found = geometry(value)
        name = self._names.get(found.block)
        if name is None:
            self._later += 1
            name = self._names[found.block] = f"+{self._later}"
        if name not in self._tensors:
            self._tensors[name] = row_of(value)
        return found._replace(block=name)


class RestoredBlocks:
    """The blocks of a capture, in the memory of this process."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._saved = tensors
        self._rows: dict[str, torch.Tensor] = {}

    def into(self, name: str, value: Any) -> None:
        """Fill the block that `value` looks at, if it is as large as what was saved."""
        saved, row = _as_bytes(self._saved[name]), _as_bytes(row_of(value))
        if saved.numel() == row.numel():
            self._rows[name] = row.copy_(saved)

    def tensor(self, where: Geometry) -> torch.Tensor:
        """A tensor that looks at a block."""
        row = self._row(where)
        made = torch.empty(0, dtype=where.dtype, device=row.device)
        return made.set_(row.untyped_storage(), where.offset, where.size, where.stride)

    def array(self, where: Geometry) -> np.ndarray:
        """An array that looks at a block."""
        row = self._row(where).numpy()
        return np.ndarray(where.size, where.dtype, row, where.offset, where.stride)

    def lies(self, value: Any, where: Geometry) -> bool:
        """Return True if a tensor or an array looks at its block in the way it did."""
        now = geometry(value)
        block = geometry(self._row(where)).block
        return now == where._replace(block=block)

    def _row(self, where: Geometry) -> torch.Tensor:
        if where.block not in self._rows:
            saved = _as_bytes(self._saved[where.block])
            self._rows[where.block] = saved.clone().to(where.device)
        return self._rows[where.block]


def _as_bytes(row: torch.Tensor) -> torch.Tensor:
    size = (row.untyped_storage().nbytes(),)
    if row.storage_offset() or row.numel() * row.element_size() != size[0]:
        return row.detach().contiguous().view(torch.uint8)
    made = torch.empty(0, dtype=torch.uint8, device=row.device)
    return made.set_(row.untyped_storage(), 0, size, (1,))


_ENOUGH = 2
"""Iterations in which a gradient must have been dropped unread."""


_PATIENCE = 16
"""Iterations without any gradient at the head of a loop after which none is waited for."""


_NEVER = -1


class Seen(NamedTuple):
    """A gradient as it lay at the head of a loop.

    Attributes:
        owner: Whose it is.
        grad: The gradient.
        version: It had this one.
    """

    owner: torch.Tensor
    grad: torch.Tensor | None
    version: int

    def lies(self) -> bool:
        """Return True if it lies there as it did."""
        now = gradient(self.owner)
        return now is self.grad and (now is None or now._version == self.version)

    @classmethod
    def of(cls, owner: torch.Tensor) -> Seen:
        """The gradient of `owner` as it lies now."""
        grad = gradient(owner)
        return cls(owner, grad, 0 if grad is None else grad._version)


class GradientUse:
    """Watches what becomes of gradients.

    Only one at a time may watch in a process; `close` ends it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._expected: dict[int, tuple[str, Seen]] = {}
        self._zeroed: set[int] = set()
        self._drops: dict[int, dict[int, int]] = {}
        self._settled: set[int] = set()
        self._without: Counter[int] = Counter()
        self._loop: int | None = None
        self._zeroing = False
        self._to_none = True
        self._remove: Callable[[], None] | None = None

    def boundary(self, loop: int, tensors: Iterable[torch.Tensor]) -> None:
        """The program is at the head of `loop`; `tensors` are those whose gradients count.

        Raises:
            AutosaveError: When a gradient that was not saved has been added to.
        """
        if self._remove is None and loop in self._settled:
            # Nothing is watched, nor will be: so it is at all but a loop's first steps.
            self._loop = loop
            return
        for seen in self._seen.values():
            # Nobody has dropped it in this iteration.
            self._judge(id(seen.owner), _NEVER)
        self._seen.clear()
        for path, left in self._expected.values():
            if not left.lies():
                raise _missing(path)
        self._loop = loop
        if loop not in self._settled:
            drops = self._drops.setdefault(loop, {})
            for owner in tensors:
                if gradient(owner) is not None and 0 <= drops.get(id(owner), 0) < _ENOUGH:
                    self._seen[id(owner)] = Seen.of(owner)
            self._without[loop] += not self._seen
            if not self._seen and (drops or self._without[loop] >= _PATIENCE):
                self._settled.add(loop)
        self._watch(bool(self._seen or self._expected))

    def is_dead(self, owner: torch.Tensor) -> bool:
        """Return True if the gradient of `owner` is dropped unread, here at the loop's head."""
        if self._loop is None:
            return False
        return self._drops.get(self._loop, {}).get(id(owner), 0) >= _ENOUGH

    def stand_in(self, owner: torch.Tensor) -> Gradient | None:
        """Value to save in place of a dead gradient."""
        return Gradient.ZEROED if id(owner) in self._zeroed else Gradient.DROPPED

    def expect(self, path: str, owner: torch.Tensor) -> None:
        """The gradient of `owner`, called `path`, was not saved: see that nobody reads it."""
        self._expected[id(owner)] = (path, Seen.of(owner))
        self._watch(True)

    def close(self) -> None:
        """Watch no more."""
        self._seen.clear()
        self._expected.clear()
        self._watch(False)

    def _judge(self, owner: int, drop: int) -> None:
        assert self._loop is not None
        drops = self._drops[self._loop]
        drops[owner] = _NEVER if drop == _NEVER else drops.get(owner, 0) + 1

    def _read(self, owner: torch.Tensor) -> None:
        if self._zeroing:
            self._anew(owner)
            if not self._to_none:
                self._zeroed.add(id(owner))
            return
        if id(owner) in self._expected:
            raise _missing(self._expected[id(owner)][0])
        if self._seen.pop(id(owner), None) is not None:
            self._judge(id(owner), _NEVER)

    def _anew(self, owner: torch.Tensor) -> None:
        """A gradient is dropped or zeroed."""
        expected = self._expected.pop(id(owner), None)
        if expected is not None and not expected[1].lies():
            raise _missing(expected[0])
        seen = self._seen.pop(id(owner), None)
        if seen is not None:
            self._judge(id(owner), 1 if seen.lies() else _NEVER)

    def _watch(self, watched: bool) -> None:
        if watched and self._remove is None:
            self._remove = self._install()
        elif not watched and self._remove is not None:
            self._remove()
            self._remove = None

    def _install(self) -> Callable[[], None]:
        """Put watchers in the way to gradients; gives what takes them away again."""

        def get(owner: torch.Tensor) -> torch.Tensor | None:
            self._read(owner)
            return plain_gradient(owner)

        def put(owner: torch.Tensor, grad: torch.Tensor | None) -> None:
            self._anew(owner)
            set_gradient(owner, grad)

        def zeroing(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def zero_grad(owner: Any, set_to_none: bool = True) -> Any:
                self._zeroing, self._to_none = True, set_to_none
                try:
                    return plain(owner, set_to_none)
                finally:
                    self._zeroing = False

            return zero_grad

        owners: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
        plain = [owner.zero_grad for owner in owners]
        torch.Tensor.grad = property(  # type: ignore[assignment]
            get, put, lambda owner: put(owner, None)
        )
        for owner, item in zip(owners, plain, strict=True):
            owner.zero_grad = zeroing(item)

        def remove() -> None:
            del torch.Tensor.grad
            for owner, item in zip(owners, plain, strict=True):
                owner.zero_grad = item

        return remove


def _missing(path: str) -> AutosaveError:
    return AutosaveError(
        f"the gradient of `{path}` is read or added to, but it was not saved: in the first steps "
        "the program dropped it first. Drop gradients at the end of each step, and start anew"
    )


class ParametrizedClass(NamedTuple):
    """Recipe for the class of a parametrized module.

    Attributes:
        base: The class before.
        tensors: Names of the tensors that are computed.
    """

    base: type
    tensors: tuple[str, ...]

    def made(self) -> type:
        """A class of this kind."""
        blank: Any = object.__new__(self.base)
        parametrize._inject_new_class(blank)
        for tensor in self.tensors:
            parametrize._inject_property(blank, tensor)
        made: type = type(blank)
        return made


def class_of(value: Any) -> type | ParametrizedClass:
    """The class of an object, as it can be written down."""
    kind = type(value)
    if kind.__module__ != parametrize.__name__ or not isinstance(value, nn.Module):
        return kind
    if not parametrize.is_parametrized(value):
        return kind
    tensors: Any = value.parametrizations
    return ParametrizedClass(kind.__mro__[1], tuple(tensors))


def class_from(kind: type | ParametrizedClass) -> type:
    """The class that `class_of` has written down."""
    return kind.made() if isinstance(kind, ParametrizedClass) else kind
