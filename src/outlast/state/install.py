"""Installing a saved state: the targets in the live objects of this rank, and the hand-over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.live import (
    FittingState,
    State,
    has_extra_state,
    module_tensors,
    name_of,
    optimizers_of,
    parameter_names,
    plain_modules,
    reshard,
)
from outlast.state.tensors import Facts, dtype_name, dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable

Misfit = Literal["missing", "unexpected", "reshaped", "retyped"]
MISFITS: tuple[Misfit, ...] = ("missing", "unexpected", "reshaped", "retyped")
_NAMED = 5


@dataclass(frozen=True)
class Saved:
    """Names and facts of a saved state.

    Attributes:
        tensors: Element type and global shape of every tensor.
        values: Every JSON value that can be read here.
        names: Names of all values.
    """

    tensors: Mapping[str, Facts]
    values: Mapping[str, Any]
    names: Collection[str]


@dataclass
class Targets:
    """Destinations of a version's content on this rank.

    Attributes:
        tensors: Name to live tensor, filled in place.
        values: Names of the JSON values that are used.
        missing: Live names that the version has not.
        asked: Keys of the state, as given to `restore`.
        states: Optimizer, parameter and the state that it is given, once all is read.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    states: list[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]] = field(
        default_factory=list
    )


def find_targets(state: State, found: Saved) -> Targets:
    """Match the live objects of `state` with the entries of what was saved.

    A `FittingState` takes on the shapes that were saved first.
    Optimizer states that do not exist yet are made, beside the live ones; see `install`. An object
    with a true attribute `may_be_missing`, as what each process has for itself, stays as it is
    where nothing was saved of it.
    """
    if isinstance(state, FittingState):
        state.fit({name: facts.shape for name, facts in found.tensors.items()})
    reshard(state)
    targets = Targets(asked=list(state))
    saved = _Saved(found)
    for key, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in module_tensors(value):
                targets.tensors[f"{key}.{name}"] = tensor
            for name, module in plain_modules(value):
                if has_extra_state(module):
                    _want_value(targets, saved, f"{key}.{name}._extra_state")
        elif (optimizers := optimizers_of(value)) is not None:
            names = parameter_names(state, key)
            for optimizer in optimizers:
                _find_optimizer(targets, saved, key, optimizer, names)
        elif key in saved.values or getattr(value, "may_be_missing", False) is not True:
            _want_value(targets, saved, key)
    targets.missing += [name for name in targets.tensors if name not in saved.tensors]
    return targets


class _Saved:
    """Quick look-ups in what was saved."""

    def __init__(self, found: Saved) -> None:
        self.tensors = found.tensors
        self.values = found.values
        self._states: dict[str, list[str]] = {}
        for name in self.tensors:
            owner, _, part_name = name.rpartition(".")
            self._states.setdefault(owner, []).append(part_name)

    def states(self, path: str) -> list[str]:
        """Names of the tensors directly below `path`."""
        return self._states.get(path, [])


def _want_value(targets: Targets, saved: _Saved, name: str) -> None:
    if name not in saved.values:
        targets.missing.append(name)
        return
    targets.values.add(name)
    for tensor in values.tensors_of(saved.values[name]):
        facts = saved.tensors[tensor]
        targets.tensors[tensor] = torch.empty(facts.shape, dtype=dtype_of(facts))


def _find_optimizer(
    targets: Targets,
    saved: _Saved,
    key: str,
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
) -> None:
    for group in optimizer.param_groups:
        _check_group(saved, key, [name_of(parameter, names, key) for parameter in group["params"]])
        for parameter in group["params"]:
            name = name_of(parameter, names, key)
            for path in (f"{key}.groups.{name}", f"{key}.other.{name}"):
                if not isinstance(saved.values.get(path, {}), dict):
                    raise CheckpointError(f"`{path}` is no table of settings by name")
            _want_value(targets, saved, f"{key}.groups.{name}")
            if f"{key}.other.{name}" in saved.values:
                _want_value(targets, saved, f"{key}.other.{name}")
            live = optimizer.state.get(parameter, {})
            parts = saved.states(f"{key}.state.{name}")
            state: dict[str, Any] = {}
            for part in parts:
                tensor = live.get(part)
                if not isinstance(tensor, torch.Tensor):
                    facts = saved.tensors[f"{key}.state.{name}.{part}"]
                    saved_group = saved.values.get(f"{key}.groups.{name}", group)
                    tensor = _state_tensor(parameter, part, facts, saved_group)
                state[part] = targets.tensors[f"{key}.state.{name}.{part}"] = tensor
            if parts:
                # A parameter without a saved state had none: it is given none.
                targets.missing += [
                    f"{key}.state.{name}.{part}"
                    for part, tensor in live.items()
                    if isinstance(tensor, torch.Tensor) and part not in parts
                ]
            targets.states.append((optimizer, parameter, state))


def _check_group(saved: _Saved, key: str, names: list[str]) -> None:
    """Refuse to give parameters with different settings one group."""
    found = {
        name: saved.values[f"{key}.groups.{name}"]
        for name in names
        if f"{key}.groups.{name}" in saved.values
    }
    first = next(iter(found), "")
    for name, settings in found.items():
        if settings != found[first]:
            differ = [
                setting for setting in settings if settings[setting] != found[first].get(setting)
            ]
            raise CheckpointError(
                f"`{first}` and `{name}` are in one group of `{key}`, but were saved with "
                f"different {', '.join(differ)}; make the groups as they were"
            )


def _state_tensor(
    parameter: torch.Tensor, part: str, facts: Facts, group: dict[str, Any]
) -> torch.Tensor:
    """An empty tensor for an optimizer state, sharded and placed as its parameter."""
    if isinstance(parameter, DTensor) and facts.shape == tuple(parameter.shape):
        local = torch.empty_like(parameter.to_local(), dtype=dtype_of(facts))
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    # As in Optimizer.load_state_dict: step counters stay on the host unless a kernel reads them.
    on_host = part == "step" and not (group.get("capturable") or group.get("fused"))
    device = torch.device("cpu") if on_host else parameter.device
    if facts.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype_of(facts), device=device).detach()
    return torch.empty(facts.shape, dtype=dtype_of(facts), device=device)


def check_fit(targets: Targets, saved: Saved, taken: set[str], allow: Collection[Misfit]) -> str:
    """Why the version does not fit the live state; empty when it does.

    Args:
        targets: Of this rank.
        saved: The version.
        taken: Names that any rank uses.
        allow: Kinds of misfit that are all right.
    """
    facts = saved.tensors
    everything = [*facts, *saved.names]
    found: dict[Misfit, list[str]] = {misfit: [] for misfit in MISFITS}
    found["missing"] = [f"`{name}`" for name in targets.missing]
    found["unexpected"] = [
        f"`{name}`"
        for name in everything
        if name not in taken
        and any(name == key or name.startswith(f"{key}.") for key in targets.asked)
    ]
    for name, tensor in targets.tensors.items():
        if name in facts:
            shape, dtype = tuple(tensor.shape), dtype_name(tensor)
            if facts[name].shape != shape:
                found["reshaped"].append(
                    f"`{name}` has the shape {facts[name].shape} there and {shape} in the model"
                )
            if facts[name].dtype != dtype:
                found["retyped"].append(
                    f"`{name}` is {facts[name].dtype} there and {dtype} in the model"
                )
    words = {
        "missing": "it has no {}",
        "unexpected": "the model has no {}",
        "reshaped": "{}",
        "retyped": "{}",
    }
    sentences = [
        words[kind].format(_listed(names))
        for kind, names in found.items()
        if names and kind not in allow
    ]
    refused = [kind for kind, names in found.items() if names and kind not in allow]
    if not sentences:
        return ""
    allowed = ", ".join(f'"{kind}"' for kind in refused)
    return f"{'; '.join(sentences)}; to restore the rest all the same, say allow=[{allowed}]"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more


def install(state: State, targets: Targets, saved: Saved) -> None:
    """Hand over what are no live tensors: optimizer states and settings, other objects."""

    def tensor(name: str, kind: str) -> Any:
        found = targets.tensors[name]
        return found.numpy() if kind == "numpy" else found

    for optimizer, parameter, entries in targets.states:
        if entries:
            optimizer.state[parameter] = entries
        else:
            optimizer.state.pop(parameter, None)
    for key, value in state.items():
        if isinstance(value, nn.Module):
            for name, module in plain_modules(value):
                path = f"{key}.{name}._extra_state"
                if path in targets.values:
                    module.set_extra_state(values.decode(saved.values[path], tensor))
        elif (optimizers := optimizers_of(value)) is not None:

            def decoded(what: str, name: str, key: str = key) -> Any:
                path = f"{key}.{what}.{name}"
                if path not in targets.values:
                    return None
                return values.decode(saved.values[path], tensor)

            for optimizer in optimizers:
                _install_settings(optimizer, parameter_names(state, key), decoded)
        elif key in targets.values:
            value.load_state_dict(values.decode(saved.values[key], tensor))


def _install_settings(
    optimizer: torch.optim.Optimizer, paths: dict[int, str], decoded: Callable[[str, str], Any]
) -> None:
    """Settings of the groups and states that are no tensors.

    Args:
        optimizer: Whose.
        paths: Parameter's identity to its plain name.
        decoded: The saved value of (what, plain name), or None.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            others = decoded("other", paths[id(parameter)])
            if others is not None:
                optimizer.state[parameter].update(others)
        found = (decoded("groups", paths[id(parameter)]) for parameter in group["params"])
        # All parameters of a group share its settings.
        settings: dict[str, Any] = next((misfit for misfit in found if misfit is not None), {})
        for name, value in settings.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
