"""From live objects to named tensors and values, and back.

A tensor's name is its fully qualified name in the plain model, whatever wraps or shards it; that
is what makes a checkpoint independent of the number of ranks. Optimizer states are named after
their parameters. Other objects give their ``state_dict()``, whose tensors get the path that leads
to them as names.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole
from outlast.state.sharded import is_dtensor, is_fsdp1_module, is_fsdp_module
from outlast.state.tensors import OPAQUE, dtype_of, is_dense, opaque_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.state.tensors import Facts


State = Mapping[str, Any]
"""Name -> nn.Module, Optimizer (or a sequence of them) or an object with a ``state_dict``."""


class FittingState(dict[str, Any]):
    """A state whose objects take on the shapes of what was saved, before they are filled.

    Args:
        parts: As of `State`.
        fit: Called with the global shape of every saved tensor by name, on all ranks together; may
            put other objects into this state.
    """

    def __init__(self, parts: State, fit: Callable[[dict[str, tuple[int, ...]]], object]) -> None:
        super().__init__(parts)
        self.fit = fit


# What wrappers put in front of a module's own name; "module" is also a name that a model may use.
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class Live:
    """The state as it lies in this process.

    Attributes:
        tensors: Name to tensor; names of tied tensors lead to the same object.
        values: Name to JSON value.
        objects: Names of the tensors that belong to values.
        varying: Names of the tensors that forward passes and others change, and not optimizers
            alone: all but parameters and optimizer states. Ranks that hold the same box of one may
            have other content in it, as of BatchNorm's statistics; that of the first counts.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor.

        Raises:
            CheckpointError: When another one has this name.
        """
        if self.tensors.setdefault(name, tensor) is not tensor:
            raise CheckpointError(
                f"two tensors of the state have the name `{name}`; give the state keys of which "
                "none begins with another one and a dot"
            )


def collect(state: State) -> Live:
    """Name every tensor and value of `state`; nothing is copied.

    Raises:
        CheckpointError: When something cannot be saved.
    """
    return Collector().collect(state)


class Collector:
    """Names the tensors and values of one state again and again.

    Names are made anew only where modules, parameters or the entries of optimizers have changed.
    No object of the state is kept alive.
    """

    def __init__(self) -> None:
        self._names: _Names | None = None

    def collect(self, state: State) -> Live:
        """As the function `collect`."""
        names, self._names = self._names, None
        parts = None if names is None else names.find(state)
        if names is None or parts is None:
            reshard(state)
            names = _Names(state)
            parts = _Parts.of(state, names.found)
            names.remember(parts)
        live = names.live(state, parts)
        self._names = names
        return live


@dataclass
class _Parts:
    """The objects of a state, side by side, so that thousands are looked at in one call.

    Attributes:
        kinds: What each value of the state is: None for a module, the number of optimizers, or a
            negative number for another object.
        modules: In the order of their names, as often as they have one.
        optimizers: Of all values.
        tensors: All parameters, then all buffers of the modules; None where there is none.
        owned: Parameters of the optimizers.
        entries: What the optimizers keep of each of these.
        entered: All that is in these.
    """

    kinds: list[int | None]
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[torch.Tensor | None]
    owned: list[torch.Tensor]
    entries: list[Mapping[Any, Any]]
    entered: list[Any]

    @classmethod
    def of(cls, state: State, modules: list[nn.Module]) -> _Parts:
        """The parts of `state`, whose modules are known."""
        kinds: list[int | None] = []
        optimizers: list[torch.optim.Optimizer] = []
        for value in state.values():
            is_module = isinstance(value, nn.Module)
            found = None if is_module else optimizers_of(value)
            optimizers += found or []
            kinds.append(None if is_module else -1 if found is None else len(found))
        tensors: list[torch.Tensor | None] = []
        for table in ("_parameters", "_buffers"):
            for content in map(attrgetter(table), modules):
                tensors += content.values()
        owned: list[torch.Tensor] = []
        entries: list[Mapping[Any, Any]] = []
        for optimizer in optimizers:
            members = [member for group in optimizer.param_groups for member in group["params"]]
            owned += members
            entries += map(optimizer.state.get, members, repeat({}))
        entered = [*chain.from_iterable(map(methodcaller("values"), entries))]
        return cls(kinds, modules, optimizers, tensors, owned, entries, entered)

    def structure(self) -> tuple[list[Any], list[object]]:
        """Collect what must be equal, and what must be the same objects, for names to stay."""
        equal: list[Any] = [self.kinds, [*map(type, self.modules)]]
        children: list[object] = []
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            contents = [*map(attrgetter(table), self.modules)]
            equal += [[*map(len, contents)], [*chain.from_iterable(contents)]]
            if table == "_modules":
                children = [*chain.from_iterable(map(methodcaller("values"), contents))]
        groups = [group["params"] for item in self.optimizers for group in item.param_groups]
        equal += [
            [len(optimizer.state) for optimizer in self.optimizers],
            [*map(len, groups)],
            [*map(len, self.entries)],
            [*chain.from_iterable(self.entries)],
            [*map(type, self.entered)],
        ]
        same = [*self.optimizers, *children, *self.tensors, *self.owned]
        # A reference to what has gone gives None, too.
        return [*equal, [*map(type, same)]], same


class _Names:
    """The names in a state, and what they depend on.

    Args:
        state: Whose modules are shown sharded; see `reshard`.

    Attributes:
        found: The modules of the state, until `remember` is called.

    Raises:
        CheckpointError: When something cannot be named.
    """

    def __init__(self, state: State) -> None:
        self._keys = [*state]
        self._roots: list[int] = []
        self.found: list[nn.Module] = []
        paths = []
        self._extras: list[tuple[int, str]] = []
        self._objects: list[str] = []
        self._groups: list[tuple[int, int, list[str]]] = []
        owned: list[tuple[str, str]] = []
        optimizers = 0
        for key, value in state.items():
            if isinstance(value, nn.Module):
                self._roots.append(len(self.found))
                for name, module in plain_modules(value):
                    if has_extra_state(module):
                        self._extras.append((len(self.found), f"{key}.{name}._extra_state"))
                    paths.append(f"{key}.{name}." if name else f"{key}.")
                    self.found.append(module)
            elif (found := optimizers_of(value)) is not None:
                names = parameter_names(state, key)
                for optimizer in found:
                    _check_owners(key, optimizer)
                    for number, group in enumerate(optimizer.param_groups):
                        own = [name_of(member, names, key) for member in group["params"]]
                        if own:
                            groups = [f"{key}.groups.{name}" for name in own]
                            self._groups.append((optimizers, number, groups))
                        owned += [(key, name) for name in own]
                    optimizers += 1
                _refuse_shared(key, found, names)
            else:
                self._objects.append(key)
        self._named(_Parts.of(state, self.found), paths, owned)

    def _named(self, parts: _Parts, paths: list[str], owned: list[tuple[str, str]]) -> None:
        """Name all tensors: None is no tensor, or none that is saved."""
        names: list[str | None] = []
        self._varying: set[str] = set()
        for path, module in zip(paths, parts.modules, strict=True):
            names += [
                None if parameter is None else path + name
                for name, parameter in module._parameters.items()
            ]
        for path, module in zip(paths, parts.modules, strict=True):
            hidden = module._non_persistent_buffers_set
            names += [
                None if buffer is None or name in hidden else path + name
                for name, buffer in module._buffers.items()
            ]
        for name, tensor in zip(names, parts.tensors, strict=True):
            if name is not None and not isinstance(tensor, nn.Parameter):
                self._varying.add(name)
        self._others: list[tuple[int, str]] = []
        for number, ((key, owner), entries) in enumerate(zip(owned, parts.entries, strict=True)):
            others = False
            for part, value in entries.items():
                is_tensor = isinstance(value, torch.Tensor)
                names.append(f"{key}.state.{owner}.{part}" if is_tensor else None)
                others = others or not is_tensor
            if others:
                self._others.append((number, f"{key}.other.{owner}"))
        everything: list[Any] = [*parts.tensors, *parts.entered]
        live = Live()
        for name, tensor in zip(names, everything, strict=True):
            if name is not None:
                live.put(name, tensor)
        self._mask = [name is not None for name in names]
        self._tensors = [name for name in names if name is not None]
        # Of two tensors with one name, which are one now, it would not be seen that they part.
        self._repeated = len(live.tensors) < len(self._tensors)

    def remember(self, parts: _Parts) -> None:
        """Note what the names depend on, without keeping it alive."""
        self._equal, same = parts.structure()
        self._modules = [*map(weakref.ref, self.found)]
        # A reference to nothing.
        self._same = [type(None) if item is None else weakref.ref(item) for item in same]
        self._sharded = [n for n, module in enumerate(self.found) if is_fsdp_module(module)]
        self.found = []

    def find(self, state: State) -> _Parts | None:
        """The parts of `state`; None when they are not named as before."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        if [*state] != self._keys or self._repeated or len(modules) < len(self._modules):
            return None
        roots = [value for value in state.values() if isinstance(value, nn.Module)]
        if len(roots) != len(self._roots) or not all(
            root is modules[number] for root, number in zip(roots, self._roots, strict=True)
        ):
            return None
        for number in self._sharded:
            modules[number].reshard()  # type: ignore[operator]
        parts = _Parts.of(state, modules)
        equal, same = parts.structure()
        known = equal == self._equal and len(same) == len(self._same)
        return parts if known and all(map(is_, same, map(call, self._same))) else None

    def live(self, state: State, parts: _Parts) -> Live:
        """Everything by its name."""
        everything: list[Any] = [*parts.tensors, *parts.entered]
        named = zip(self._tensors, compress(everything, self._mask), strict=True)
        live = Live(dict(named), varying=set(self._varying))
        put = put_into(live)
        for number, path in self._extras:
            extra = parts.modules[number].get_extra_state()
            live.values[path] = values.encode(extra, path, put)
        for owner, number, paths in self._groups:
            group = parts.optimizers[owner].param_groups[number]
            settings = {name: member for name, member in group.items() if name != "params"}
            live.values.update(dict.fromkeys(paths, values.encode(settings, paths[0], put)))
        for number, path in self._others:
            entries = parts.entries[number].items()
            others = {part: item for part, item in entries if not isinstance(item, torch.Tensor)}
            live.values[path] = values.encode(others, path, put)
        for key in self._objects:
            live.values[key] = values.encode(state[key].state_dict(), key, put)
        return live


def reshard(state: State) -> None:
    """Make FSDP2 show the sharded parameters, which a forward pass without backward hides."""
    for value in state.values():
        if isinstance(value, nn.Module):
            for module in value.modules():
                if is_fsdp_module(module):
                    module.reshard()
                elif is_fsdp1_module(module):
                    raise CheckpointError(
                        "FSDP1 (FullyShardedDataParallel) hides its parameters in flat ones, which "
                        "cannot be named; shard the model with FSDP2's fully_shard"
                    )


def _check_owners(key: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what an optimizer keeps under something else than its parameters."""
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for owner in optimizer.state:
        if owner not in parameters:
            raise CheckpointError(
                f"the optimizer `{key}` keeps a state under {str(owner)[:60]!r}, which is no "
                "parameter of it; give it a state_dict() of its own in the state"
            )


def _refuse_shared(
    key: str, optimizers: list[torch.optim.Optimizer], names: dict[int, str]
) -> None:
    """Refuse a parameter of two optimizers, whose settings would have one name."""
    seen: set[int] = set()
    for optimizer in optimizers:
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        if both := seen & own:
            raise CheckpointError(
                f"two optimizers of `{key}` have the parameter `{names[min(both)]}`; give each of "
                "them a key of its own in the state"
            )
        seen |= own


def module_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of `module` with their plain names."""
    for name, item in plain_modules(module):
        prefix = f"{name}." if name else ""
        for own, parameter in item._parameters.items():
            if parameter is not None:
                yield f"{prefix}{own}", parameter
        for own, buffer in item._buffers.items():
            if buffer is not None and own not in item._non_persistent_buffers_set:
                yield f"{prefix}{own}", buffer


def plain_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below `module` under the name that it has without wrappers."""
    plain = {"": ""}
    wrappers = {"": isinstance(module, _WRAPPERS)}
    yield "", module
    for path, item in module.named_modules(remove_duplicate=False):
        if path:
            parent, _, own = path.rpartition(".")
            inside = (wrappers[parent] and own == "module") or own in _WRAPPED
            plain[path] = plain[parent] if inside else f"{plain[parent]}.{own}".lstrip(".")
            wrappers[path] = isinstance(item, _WRAPPERS)
            yield plain[path], item


def has_optimizer(state: State) -> bool:
    """Return whether `state` holds a module and an optimizer, so that steps can be replayed."""
    optimizer = torch.optim.Optimizer
    return any(isinstance(item, nn.Module) for item in state.values()) and any(
        isinstance(item, optimizer)
        or (isinstance(item, Sequence) and any(isinstance(one, optimizer) for one in item))
        for item in state.values()
    )


def objects_of(state: State) -> list[str]:
    """Keys of what is neither a module nor optimizers."""
    return [
        key
        for key, value in state.items()
        if not isinstance(value, nn.Module) and optimizers_of(value) is None
    ]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_extra_state(module: nn.Module) -> bool:
    """Return whether `module` has a state beside its parameters and buffers."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def parameter_names(state: State, key: str) -> dict[int, str]:
    """Plain name of every parameter of the state's module, by the parameter's identity."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(modules) > 1:
        raise CheckpointError(
            f"the state holds {len(modules)} modules; wrap them in one module, so that the "
            "optimizer's owner is clear"
        )
    if not modules:
        raise CheckpointError(
            f"the optimizer `{key}` needs its model in the same state: its tensors are named "
            "after the model's parameters"
        )
    names: dict[int, str] = {}
    for name, tensor in module_tensors(modules[0]):
        # Of tied parameters the first name counts, as in named_parameters().
        names.setdefault(id(tensor), name)
    return names


def name_of(parameter: torch.Tensor, names: dict[int, str], key: str) -> str:
    """Plain name of a parameter of the optimizer `key`; raises CheckpointError without one."""
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimizer `{key}` has a parameter of shape {tuple(parameter.shape)} that is none "
            "of the model's; make the optimizer after the model is sharded or moved"
        )
    return names[id(parameter)]


def optimizers_of(value: Any) -> list[torch.optim.Optimizer] | None:
    """`value` as a list of optimizers, or None when it is another object with a state."""
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(v, torch.optim.Optimizer) for v in value):
        return list(value)
    if all(hasattr(value, name) for name in ("state_dict", "load_state_dict")):
        return None
    raise CheckpointError(
        f"a state of type {type(value).__name__} cannot be saved: it is neither a module, nor an "
        "optimizer, nor has it state_dict() and load_state_dict()"
    )


def put_into(live: Live, *, copied: bool = False) -> Callable[[str, Any], str | None]:
    """Makes tensors and arrays within values entries of `live`, as `values.encode` asks.

    Args:
        live: Where they go.
        copied: Take copies, for what may be changed in place before it is staged.
    """

    def put(path: str, value: Any) -> str | None:
        plain = type(value) in (torch.Tensor, nn.Parameter)
        if not plain and is_dtensor(value):
            raise CheckpointError(
                f"`{path}` is a sharded tensor, of which each rank has a part only; save it as a "
                "parameter or buffer of the module"
            )
        # What consists of several tensors is refused with all that a checkpoint cannot hold.
        if plain or is_traceable_wrapper_subclass(value):
            live.put(path, value.detach().clone() if copied else value)
        elif type(value) is np.ndarray:
            try:
                found = np.array(value, order="C") if copied else np.ascontiguousarray(value)
                content = torch.from_numpy(found)
            except (TypeError, ValueError):
                # Objects, texts, dates, the other byte order.
                return None
            live.put(path, content.reshape(value.shape))
        else:
            return None
        live.objects.add(path)
        if not isinstance(value, nn.Parameter):
            live.varying.add(path)
        return "torch" if isinstance(value, torch.Tensor) else "numpy"

    return put


def local_box(tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The box of the global tensor that this rank holds, and its memory.

    Raises:
        CheckpointError: When the tensor is a partial sum, quantised, sparse, nested, on no device
            or has no shape yet.
    """
    if is_dtensor(tensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(
                "a partial sum cannot be saved: redistribute it to Shard or Replicate first"
            )
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        local = tensor.to_local()
        _refuse_unsuited(local)
        return Box(tuple(chunk.offsets), tuple(local.shape)), local.detach()
    _refuse_unsuited(tensor)
    return whole(tuple(tensor.shape)), tensor.detach()


def _refuse_unsuited(tensor: torch.Tensor) -> None:
    """Refuse tensors whose content is not all in one dense memory of their own."""
    what: tuple[str, str] | None = None
    if is_lazy(tensor):
        what = "tensor without a shape", "run one forward pass first"
    elif tensor.device.type == "meta":
        what = "meta tensor", "give it memory with to_empty() and fill it first"
    elif tensor.is_nested:
        what = "nested tensor", "give its values and offsets"
    elif tensor.dtype in _QUANTISED:
        what = "quantised tensor", "give its int_repr(), scale and zero point"
    elif tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        what = f"{layout} tensor", "give a dense one, e.g. its indices and values"
    if what:
        raise CheckpointError(f"a {what[0]} cannot be saved; {what[1]}")
    wrapped: bool = is_traceable_wrapper_subclass(tensor)
    if wrapped:
        raise CheckpointError(
            f"a {type(tensor).__name__} cannot be saved: it consists of other tensors; give those"
        )


def mesh_of(live: Live) -> dict[str, int]:
    """Name to size of the axes of the mesh that the state is sharded on; empty without shards."""
    of_each_type = dict(zip(map(type, live.tensors.values()), live.tensors.values(), strict=True))
    for tensor in of_each_type.values():
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
            return dict(zip(names, mesh.shape, strict=True))
    return {}


class Filling:
    """A live tensor and the host memory that it is read into: its own, where that is possible.

    Args:
        name: Of the saved tensor.
        tensor: The live one.
        facts: Of the saved tensor.
        box: The part of the saved tensor that is read; None: what this rank holds.

    Attributes:
        local: Memory of the live tensor.
        out: Array to be filled.
        extra_bytes: Host memory that it needs besides.
    """

    def __init__(
        self, name: str, tensor: torch.Tensor, facts: Facts, box: Box | None = None
    ) -> None:
        held, self.local = local_box(tensor)
        self.name, self.box = name, held if box is None else box
        dtype, stride = dtype_of(facts), self.local.stride()
        # All along an expanded dimension is one and the same memory.
        self._expanded = [
            dimension
            for dimension, size in enumerate(self.local.shape)
            if stride[dimension] == 0 and size > 1
        ]
        direct = (
            self.local.device.type == "cpu"
            and self.local.dtype == dtype
            and not (self.local.is_conj() or self.local.is_neg())
        )
        if not is_dense(self.local):
            direct = direct and self.local.element_size() in OPAQUE and not self._expanded
        self._host = self.local if direct else torch.empty(tuple(self.local.shape), dtype=dtype)
        self.extra_bytes = 0 if direct else self._host.numel() * self._host.element_size()
        self.out = opaque_array(self._host)

    def finish(self) -> None:
        """Move what was read to where it belongs."""
        if self._host is self.local:
            return
        target, source = self.local, self._host
        for dimension in self._expanded:
            target = target.narrow(dimension, 0, 1)
            source = source.narrow(dimension, 0, 1)
        if self._expanded and not bool((self.out == opaque_array(source)).all()):
            raise CheckpointError(
                f"`{self.name}` was saved with content that differs along a dimension in which the "
                "live tensor is expanded; give that memory of its own (clone())"
            )
        with torch.no_grad():
            target.copy_(source)
