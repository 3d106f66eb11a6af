"""torchtitan's training state as entries of a store: a module, optimizers, keys of states."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import nn
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER

from outlast.checkpoint import list_versions, load
from outlast.errors import CheckpointError, IntegrationError
from outlast.state.live import module_tensors, reshard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from outlast.checkpoint import CheckpointStore


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """A module that has all that the parts of a model have, under the names that it has there.

    A rank of a pipeline holds several parts of one model, each with other children of the same
    names. Nothing is copied.

    Raises:
        IntegrationError: A part has parameters of its own beside those of its children.
    """
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        own = [*part._parameters, *(set(part._buffers) - part._non_persistent_buffers_set)]
        if own:
            raise IntegrationError(
                f"`{own[0]}` of {type(part).__name__} lies outside of any layer, so the parts of a "
                "pipeline cannot be saved as one model; put it into a module of its own"
            )
    for name in dict.fromkeys(name for part in parts for name in part._modules):
        children = [part._modules.get(name) for part in parts]
        whole.add_module(name, joined([child for child in children if child is not None]))
    return whole


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module whose buffers are `tensors`, under their full names; nothing is copied."""
    whole = nn.Module()
    for name, tensor in tensors.items():
        *path, own = name.split(".")
        module = whole
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_buffer(own, tensor)
    return whole


class Key:
    """One key of an object's state, as an entry of a store.

    torchtitan's data loaders give each data-parallel rank a key of its own in one state. As
    entries of their own, all are saved, whichever rank has them.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The value."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self.value = state["value"]


def names_in(store: CheckpointStore, step: int | None) -> set[str]:
    """Names of all that the newest version or that of `step` holds; empty where there is none."""
    versions = list_versions(store.storage)[::-1]
    for version in versions:
        if step is None or version.step == step:
            # What is incomplete or damaged will not be restored either.
            with contextlib.suppress(CheckpointError):
                catalogue = load(store.storage, version).catalogue
                return {*catalogue.tensors, *catalogue.values}
    return set()


def keys_of(name: str, state: Mapping[str, Any]) -> dict[str, Key]:
    """The entries of an object's state.

    Args:
        name: Of the object among the states.
        state: What its ``state_dict()`` gave.
    """
    return {f"{name}.{key}": Key(value) for key, value in state.items()}


class Entries:
    """The states of a torchtitan checkpoint manager as entries of a store.

    Args:
        states: Name -> object, as the manager has them: the model, optimizers, learning rates, data
            loader and what the trainer adds.
        model_parts: The parts of the model on this rank.

    Raises:
        IntegrationError: When the parts cannot be saved as one model.
    """

    def __init__(self, states: Mapping[str, Any], model_parts: Sequence[nn.Module]) -> None:
        self._states = states
        self._parts = model_parts
        self._model = joined(model_parts)
        self._still = {
            f"{MODEL}.{name}"
            for name, item in module_tensors(self._model)
            if isinstance(item, nn.Parameter)
        }

    def model(self) -> dict[str, Any]:
        """The entry of the model alone."""
        for part in self._parts:
            # The root of a part of a pipeline is no module of the joined one.
            reshard({MODEL: part})
        return {MODEL: self._model}

    def restore_model(self, store: CheckpointStore, step: int | None) -> bool:
        """Restore the weights alone, of the newest version or that of `step`.

        A version of everything has them under the parameters' names, one of the model alone under
        those of torchtitan's own checkpoints, where fused projections are apart.

        Returns:
            Whether there is a version.

        Raises:
            CheckpointError: When it is damaged or does not fit.
        """
        apart = module_of(self._states[MODEL].state_dict())
        own = {f"{MODEL}.{name}" for name, _ in module_tensors(self._model)}
        is_apart = bool(own - names_in(store, step))
        wanted = {MODEL: apart} if is_apart else self.model()
        restored = store.restore(wanted, step=step, allow=["retyped"])
        if restored is not None and is_apart:
            self._states[MODEL].load_state_dict(dict(module_tensors(apart)))
        return restored is not None

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """Entries of the states of these names; a state that is None has none."""
        entries: dict[str, Any] = {}
        for name in names:
            state = self._states[name]
            if name == MODEL:
                entries |= self.model()
            elif name == OPTIMIZER:
                entries[name] = [*state]
            elif name == DATALOADER and state is not None:
                entries |= keys_of(name, state.state_dict())
            elif state is not None:
                entries[name] = state
        return entries

    def note(self, entries: Mapping[str, Any]) -> None:
        """Bring the entries of the data loader up to date; the others show their objects as is."""
        self.model()
        loader = self._states[DATALOADER]
        state = {} if loader is None else loader.state_dict()
        for name, key in keys_of(DATALOADER, state).items():
            entries[name].value = key.value

    def loaded(self, entries: Mapping[str, Any]) -> None:
        """Give the data loader what its entries have got."""
        found = {
            name.removeprefix(f"{DATALOADER}."): entry.value
            for name, entry in entries.items()
            if isinstance(entry, Key)
        }
        if found:
            self._states[DATALOADER].load_state_dict(found)

    def is_still(self, name: str) -> bool:
        """Whether a tensor is written to by the optimizers' updates alone."""
        return name in self._still or name.startswith(f"{OPTIMIZER}.state.")
