"""What optimizers train, as a replay log holds it: gradients, settings, other changes, a digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.live import (
    Live,
    State,
    local_box,
    module_tensors,
    name_of,
    optimizers_of,
    parameter_names,
    put_into,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.distributed.group import Group

Digest = dict[str, list[int]]
"""Name to the sum of a tensor's bits read as integers, and that of their squares, modulo 2^64."""

GRADIENT, TENSOR, SETTINGS, OBJECT, EXTRA, DIGEST = (
    "gradient.",
    "tensor.",
    "settings.",
    "object.",
    "extra.",
    "digest.",
)
"""How the names of what a log holds begin."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64
# A chunk and its squares stay in a core's cache, or fill a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 16}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 22


class Trained:
    """The parameters that optimizers train, by their plain names; made by all ranks together."""

    def __init__(self, state: State, ranks: Group) -> None:
        self.module = next(item for item in state.values() if isinstance(item, nn.Module))
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.parameters: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        for key, value in state.items():
            optimizers = None if isinstance(value, nn.Module) else optimizers_of(value)
            if optimizers:
                self._names = parameter_names(state, key)
                self.optimizers += [(key, optimizer) for optimizer in optimizers]
        for key, optimizer in self.optimizers:
            for parameter in _parameters_of(optimizer):
                self.parameters[name_of(parameter, self._names, key)] = parameter
        boxes = {name: local_box(parameter)[0] for name, parameter in self.parameters.items()}
        # What several ranks hold is counted by the first of them.
        earlier = ranks.gather(boxes)[: ranks.rank]
        self._first_of_name = {
            name for name in boxes if not any(name in array for array in earlier)
        }
        self._first_of_box = {
            name
            for name, box in boxes.items()
            if not any(array.get(name) == box for array in earlier)
        }

    @property
    def outdated(self) -> bool:
        """Whether an optimizer was given other parameters."""
        now = {
            id(tensor) for _, optimizer in self.optimizers for tensor in _parameters_of(optimizer)
        }
        return now != {id(parameter) for parameter in self.parameters.values()}

    def take_gradients(self, rounded: bool, *, copy: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Bring all gradients into the form in which they are replayed; yield copies if asked to.

        Args:
            rounded: Whether to round them in place to bfloat16.
            copy: Whether to yield name and copy, as bfloat16 where they were rounded.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
                    raise CheckpointError(
                        f"the gradient of `{name}` is {gradient.layout}, {gradient.dtype}; only a "
                        f"dense one of the parameter's type {parameter.dtype} can be replayed"
                    )
                if gradient.stride() != parameter.stride():
                    # Kernels may round differently on another layout.
                    gradient = torch.empty_like(parameter).copy_(gradient)
                    parameter.grad = gradient
                if rounded and gradient.is_floating_point():
                    taken = gradient.to(torch.bfloat16)
                    if taken is not gradient:
                        gradient.copy_(taken)
                    elif copy:
                        taken = taken.clone()
                    if copy:
                        yield name, taken
                elif copy:
                    yield name, gradient.clone()

    def settings(self, when: str, live: Live) -> dict[str, dict[str, Any]]:
        """Settings of all parameter groups under the key `when`, by their names in the log."""
        found = {}
        for key, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                names = [self._names[id(parameter)] for parameter in group["params"]]
                if names:
                    path = f"{SETTINGS}{key}.{names[0]}"
                    content = {name: member for name, member in group.items() if name != "params"}
                    encoded = values.encode(content, f"{path}.{when}", put_into(live, copied=True))
                    found[path] = {"optimizer": key, "parameters": names, when: encoded}
        return found

    def set_settings(self, settings: list[dict[str, Any]], when: str) -> None:
        """The inverse of `settings`, after decoding."""
        known = {
            (setting["optimizer"], name): setting[when]
            for setting in settings
            for name in setting["parameters"]
        }
        for key, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                wanted = [(key, self._names[id(parameter)]) for parameter in group["params"]]
                if not wanted:
                    continue
                if any(known.get(pair) is not known.get(wanted[0]) for pair in wanted):
                    raise CheckpointError(f"`{key}` has other parameter groups than were logged")
                if wanted[0] not in known:
                    raise CheckpointError(f"there are no settings of `{wanted[0][1]}` for `{key}`")
                for name, value in known[wanted[0]].items():
                    if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value

    def step(self) -> None:
        """One step of every optimizer."""
        for _, optimizer in self.optimizers:
            optimizer.step()

    def digest(self) -> Digest:
        """The sums of all parameters and optimizer states that this rank counts.

        Sums over ranks do not depend on how the tensors are sharded, and integer sums not on the
        order of summation.
        """
        names, sums = [], []
        for name, parameter in self.parameters.items():
            if name in self._first_of_box:
                names.append(name)
                sums.append(_sums_of_bits(parameter))
        for key, optimizer in self.optimizers:
            for parameter in _parameters_of(optimizer):
                name = self._names[id(parameter)]
                for part, tensor in optimizer.state.get(parameter, {}).items():
                    if isinstance(tensor, torch.Tensor) and self._counts(name, tensor):
                        names.append(f"{key}.state.{name}.{part}")
                        sums.append(_sums_of_bits(tensor))
        # One transfer per device, not one per tensor.
        return dict(zip(names, _on_host(sums), strict=True))

    def _counts(self, name: str, tensor: torch.Tensor) -> bool:
        parameter = self.parameters[name]
        if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
            return name in self._first_of_name
        alike = tensor.placements == parameter.placements
        return name in (self._first_of_box if alike else self._first_of_name)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """(2,) int64: the wrapping sums of the local elements' bits as integers, and of the squares."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        local = torch.view_as_real(local) if local.is_complex() else local
        bits = local.view(_INTEGERS[local.element_size()]).reshape(-1)
        total = torch.zeros(2, dtype=torch.int64, device=bits.device)
        size = _CHUNK_ELEMENTS.get(bits.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
        for chunk in torch.split(bits, size):
            wide = chunk.to(torch.int64, copy=True)
            total[0] += wide.sum()
            total[1] += wide.mul_(wide).sum()
        return total


def _on_host(sums: list[torch.Tensor]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for device in {total.device for total in sums}:
        numbers = [number for number, total in enumerate(sums) if total.device == device]
        rows = torch.stack([sums[number] for number in numbers]).tolist()
        found.update(zip(numbers, ([item % _MODULUS for item in row] for row in rows), strict=True))
    return [found[number] for number in range(len(sums))]


def add_digest(total: Digest, part: Digest) -> None:
    """Add the sums of `part` to those of `total`, in place."""
    for name, sums in part.items():
        known = total.get(name, [0, 0])
        total[name] = [(one + other) % _MODULUS for one, other in zip(known, sums, strict=True)]


class Changes:
    """What a step changes apart from the optimizers: buffers, and parameters moved by hand."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[str, torch.Tensor] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self.mark()
        self.found()

    def mark(self) -> None:
        """Take the parameters as they are now as unchanged; called when the optimizers are done."""
        self._versions = dict(self._versions_now())

    def found(self) -> dict[str, torch.Tensor]:
        """What has changed since the mark, or the call before, by its name in the log."""
        tensors = dict(module_tensors(self._module))
        # Parameters are large: a version counter tells of changes in place. Copies, because the
        # optimizers go on with them.
        changed = {
            TENSOR + name: tensors[name].detach().clone()
            for name, version in self._versions_now()
            if self._versions.get(name) != version
        }
        buffers = {
            name: local_box(tensor)[1]
            for name, tensor in tensors.items()
            if not isinstance(tensor, nn.Parameter)
        }
        for name, different in zip(buffers, self._compare(buffers), strict=True):
            if different:
                changed[TENSOR + name] = tensors[name]
                self._copies[name] = buffers[name].clone()
        return changed

    def _versions_now(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, tensor in module_tensors(self._module):
            if isinstance(tensor, nn.Parameter):
                memory = local_box(tensor)[1]
                yield name, (memory.data_ptr(), memory._version)

    def _compare(self, buffers: dict[str, torch.Tensor]) -> list[bool]:
        """Whether each differs from its copy; kernels that change buffers count no version."""
        results = []
        for name, memory in buffers.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != memory.shape or copy.dtype != memory.dtype:
                results.append(torch.tensor([True]))
            else:
                results.append(_bytes(copy).ne(_bytes(memory)).any().reshape(1))
        devices = {result.device for result in results}
        if len(devices) == 1 and results:
            return [bool(item) for item in torch.cat(results).tolist()]
        return [bool(result) for result in results]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
