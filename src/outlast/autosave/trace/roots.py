"""What leads to the state of a step, and what `state_dict()` gives of it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.autosave.heap.tensors import gradient
from outlast.autosave.trace.dispatch import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def named_roots(step: Callable[[], Any], roots: Any) -> dict[str, Any]:
    """The roots by name, then the global names that `step` mentions, then `step` itself.

    Args:
        step: Does one step.
        roots: A mapping of names to objects, several objects, or one. Those without a name get
            the one that `step` knows them by, else that of their class.
    """
    known = _variables(step)
    found: dict[str, Any] = {}
    if isinstance(roots, Mapping):
        found.update(roots)
    else:
        several = isinstance(roots, Iterable) and not isinstance(roots, nn.Module)
        for root in roots if several else [roots]:
            name = next((name for name, other in known.items() if other is root), "")
            name = name or type(root).__name__.lower()
            while name in found:
                name += "_"
            found[name] = root
    given = {id(found_item) for found_item in found.values()}
    for name, known_item in known.items():
        if id(known_item) not in given:
            found.setdefault(name, known_item)
    found.setdefault("step", step)
    return found


def program_modules(roots: Mapping[str, Any]) -> frozenset[str]:
    """Names of the modules that the classes and functions of the roots come from."""
    found = set()
    for root in roots.values():
        name = getattr(root, "__module__", None) or type(root).__module__
        if not f"{name}.".startswith(("torch.", "builtins.", "numpy.")):
            found.add(name)
    return frozenset(found)


def outermost_modules(objects: Iterable[Any]) -> list[nn.Module]:
    """The modules that are part of no other."""
    modules = [object_ for object_ in objects if isinstance(object_, nn.Module)]
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def readable_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Identity of a tensor to what its user calls it: `model.layer.weight`, `sgd.state[...]`.

    Args:
        objects: Path to object.
    """
    found: dict[int, str] = {}
    paths = {id(object_): path for path, object_ in objects.items()}
    for module in outermost_modules(objects.values()):
        for inner, part in module.named_modules():
            prefix = f"{paths[id(module)]}.{inner}." if inner else f"{paths[id(module)]}."
            for name, item in {**vars(part), **part._parameters, **part._buffers}.items():
                if isinstance(item, torch.Tensor):
                    found.setdefault(id(item), prefix + name)
    for path, object_ in objects.items():
        # Not by its attribute, whose uses are watched.
        if isinstance(object_, torch.Tensor) and (grad := gradient(object_)) is not None:
            found.setdefault(id(grad), f"{found.get(id(object_), path)}.grad")
        if isinstance(object_, torch.optim.Optimizer):
            for parameter, state in object_.state.items():
                of = found.get(id(parameter), paths.get(id(parameter), "?"))
                for name, value in state.items() if isinstance(state, dict) else ():
                    found.setdefault(id(value), f"{path}.state[{of}].{name}")
    return found


def in_state_dicts(objects: Iterable[Any]) -> dict[int, int]:
    """Storage keys and bytes of what modules and optimizers give by `state_dict()`."""
    every = list(objects)
    found: dict[int, int] = {}
    for module in outermost_modules(every):
        for number in module.state_dict(keep_vars=True).values():
            _add(found, number)
    for said in every:
        if isinstance(said, torch.optim.Optimizer):
            _add(found, said.state_dict())
    return found


def _add(found: dict[int, int], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                _add(found, getattr(value, name))
        elif value.layout == torch.strided:
            found[storage_key(value)] = value.untyped_storage().nbytes()
    elif isinstance(value, Mapping):
        for item in value.values():
            _add(found, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(found, item)


def _variables(step: Callable[[], Any]) -> dict[str, Any]:
    """What the functions of a step know by a name: of closures, and of their module."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [step.__func__ if isinstance(step, types.MethodType) else step]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if _filled(cell):
                found.setdefault(name, cell.cell_contents)
        for name in _mentioned(function.__code__):
            if name in function.__globals__:
                found.setdefault(name, function.__globals__[name])
        waiting += [
            found_item
            for found_item in found.values()
            if isinstance(found_item, types.FunctionType)
            and found_item.__module__ == function.__module__
        ]
    return {
        name: found_item
        for name, found_item in found.items()
        if not isinstance(found_item, (types.ModuleType, types.FunctionType, type))
    }


def _mentioned(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _mentioned(const)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
