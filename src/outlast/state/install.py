"""Installing a saved state: the targets in the live objects of this rank, and the hand-over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box
from outlast.state.live import (
    FittingState,
    State,
    has_extra_state,
    local_box,
    module_tensors,
    name_of,
    optimizers_of,
    parameter_names,
    plain_modules,
    reshard,
)
from outlast.state.sharded import is_dtensor
from outlast.state.tensors import Facts, dtype_name, dtype_of

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

    @cached_property
    def parts(self) -> Mapping[str, list[str]]:
        """Last parts of the tensors' names, by what stands before them."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            owner, _, part = name.rpartition(".")
            found.setdefault(owner, []).append(part)
        return found


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

    def want_value(self, saved: Saved, name: str) -> None:
        """Ask for a value, with the tensors within it."""
        if name not in saved.values:
            self.missing.append(name)
            return
        self.values.add(name)
        for tensor in values.tensors_of(saved.values[name]):
            facts = saved.tensors[tensor]
            self.tensors[tensor] = torch.empty(facts.shape, dtype=dtype_of(facts))

    def boxes(self, saved: Saved) -> dict[str, Box]:
        """The boxes of the live tensors that are read from a version."""
        return {
            name: local_box(tensor)[0]
            for name, tensor in self.tensors.items()
            if name in saved.tensors and saved.tensors[name].shape == tuple(tensor.shape)
        }

    def tied(self, saved: Saved) -> list[list[str]]:
        """The names of each live tensor that is saved under several."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            if name in saved.tensors:
                names.setdefault(id(tensor), []).append(name)
        return [tied for tied in names.values() if len(tied) > 1]


def find_targets(state: State, saved: Saved) -> Targets:
    """Match the live objects of `state` with the entries of what was saved.

    A `FittingState` takes on the shapes that were saved first.
    Optimizer states that do not exist yet are made, beside the live ones; see `install`. An object
    with a true attribute `may_be_missing`, as what each process has for itself, stays as it is
    where nothing was saved of it.
    """
    if isinstance(state, FittingState):
        state.fit({name: facts.shape for name, facts in saved.tensors.items()})
    reshard(state)
    targets = Targets(asked=list(state))
    for key, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in module_tensors(value):
                targets.tensors[f"{key}.{name}"] = tensor
            for name, module in plain_modules(value):
                if has_extra_state(module):
                    targets.want_value(saved, f"{key}.{name}._extra_state")
        elif (optimizers := optimizers_of(value)) is not None:
            names = parameter_names(state, key)
            for optimizer in optimizers:
                _find_optimizer(targets, saved, key, optimizer, names)
        elif key in saved.values or getattr(value, "may_be_missing", False) is not True:
            targets.want_value(saved, key)
    targets.missing += [name for name in targets.tensors if name not in saved.tensors]
    for name, tensor in targets.tensors.items():
        if tensor.device.type == "meta" and name in saved.tensors:
            raise CheckpointError(
                f"`{name}` is a meta tensor; give it memory with to_empty() first"
            )
    return targets


def _find_optimizer(
    targets: Targets,
    saved: Saved,
    key: str,
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
) -> None:
    for group in optimizer.param_groups:
        own = {name_of(parameter, names, key): parameter for parameter in group["params"]}
        settings = {name: saved.values.get(f"{key}.groups.{name}") for name in own}
        known = {name: found for name, found in settings.items() if found is not None}
        first = next(iter(known), "")
        for name, found in known.items():
            if found != known[first]:
                # Parameters with different settings cannot be given one group.
                differ = [item for item in found if found[item] != known[first].get(item)]
                raise CheckpointError(
                    f"`{first}` and `{name}` are in one group of `{key}`, but were saved with "
                    f"different {', '.join(differ)}; make the groups as they were"
                )
        for name, parameter in own.items():
            groups, other, states = (
                f"{key}.{what}.{name}" for what in ("groups", "other", "state")
            )
            for path in (groups, other):
                if not isinstance(saved.values.get(path, {}), dict):
                    raise CheckpointError(f"`{path}` is no table of settings by name")
            targets.want_value(saved, groups)
            if other in saved.values:
                targets.want_value(saved, other)
            live = optimizer.state.get(parameter, {})
            parts = saved.parts.get(states, [])
            state: dict[str, Any] = {}
            for part in parts:
                tensor = live.get(part)
                if not isinstance(tensor, torch.Tensor):
                    facts = saved.tensors[f"{states}.{part}"]
                    tensor = _state_tensor(parameter, part, facts, saved.values.get(groups, group))
                state[part] = targets.tensors[f"{states}.{part}"] = tensor
            if parts:
                # A parameter without a saved state had none: it is given none.
                targets.missing += [
                    f"{states}.{part}"
                    for part, tensor in live.items()
                    if isinstance(tensor, torch.Tensor) and part not in parts
                ]
            targets.states.append((optimizer, parameter, state))


def _state_tensor(
    parameter: torch.Tensor, part: str, facts: Facts, group: dict[str, Any]
) -> torch.Tensor:
    """An empty tensor for an optimizer state, sharded and placed as its parameter."""
    if is_dtensor(parameter) and facts.shape == tuple(parameter.shape):
        local = torch.empty_like(parameter.to_local(), dtype=dtype_of(facts))
        from torch.distributed.tensor import DTensor

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
        f"`{name:.200}`"
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
    words = {"missing": "it has no ", "unexpected": "the model has no "}
    refused = [kind for kind, names in found.items() if names and kind not in allow]
    if not refused:
        return ""
    sentences = []
    for kind in refused:
        more = f" and {len(found[kind]) - _NAMED} more" if len(found[kind]) > _NAMED else ""
        sentences.append(f"{words.get(kind, '')}{', '.join(sorted(found[kind])[:_NAMED])}{more}")
    allowed = ", ".join(f'"{kind}"' for kind in refused)
    return f"{'; '.join(sentences)}; to restore the rest all the same, say allow=[{allowed}]"


def decode_values(targets: Targets, saved: Saved) -> dict[str, Any]:
    """The values that are used, by name, once the tensors of `targets` are read.

    Raises:
        CheckpointError: When one is of no kind that is known.
    """

    def tensor(name: str, kind: str) -> Any:
        found = targets.tensors[name]
        return found.numpy() if kind == "numpy" else found

    return {name: values.decode(saved.values[name], tensor) for name in sorted(targets.values)}


def install(
    state: State, targets: Targets, saved: Saved, decoded: Mapping[str, Any] | None = None
) -> None:
    """Hand over what are no live tensors: optimizer states and settings, other objects.

    Args:
        state: The live objects.
        targets: What was read of them.
        saved: Where from.
        decoded: As `decode_values` gives it, where that was called before.
    """
    decoded = decode_values(targets, saved) if decoded is None else decoded
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
                    module.set_extra_state(decoded[path])
        elif (optimizers := optimizers_of(value)) is not None:
            names = parameter_names(state, key)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    _install_settings(optimizer, group, key, names, decoded)
        elif key in targets.values:
            value.load_state_dict(decoded[key])


def _install_settings(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    key: str,
    names: dict[int, str],
    decoded: Mapping[str, Any],
) -> None:
    """Hand over the settings of a group, and of its states what are no tensors."""
    own = {names[id(parameter)]: parameter for parameter in group["params"]}
    for name, parameter in own.items():
        if (others := decoded.get(f"{key}.other.{name}")) is not None:
            optimizer.state[parameter].update(others)
    # All parameters of a group share its settings.
    found = (decoded.get(f"{key}.groups.{name}") for name in own)
    settings: dict[str, Any] = next((item for item in found if item is not None), {})
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)
        else:
            group[name] = value
