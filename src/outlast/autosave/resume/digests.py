"""Digests of the steps after a save, to see whether a resumed run does what the first did.

A digest has the states of the random numbers, and of up to 128 tensors some of their numbers: of
what set-up has named and of what the optimizers hold. A step with another batch, another state of
an optimizer or another random number changes all parameters, so a sample shows it; reading it
takes milliseconds. It is done for each of the steps that follow a save, up to the 32nd, and then
for ever fewer of them: what a step has done to the numbers is still seen in those of later steps.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_EACH = 5
"""Powers of two of steps after a save of which each has a digest."""

_FIRST = 2
"""Steps after a save whose digests have a large sample."""

_TENSORS, _LATER_TENSORS = 128, 16
_NUMBERS = 4096
_TOLERANCE = 1e-4
"""Of the sums of sampled numbers, where a device adds in an order that changes."""


def is_compared(steps: int) -> bool:
    """Return True if there is a digest so many steps after a save."""
    return steps > 0 and steps % (1 << max(0, steps.bit_length() - 1 - _EACH)) == 0


def digest(
    steps: int, objects: Mapping[str, Any], lost: Collection[str], random_states: Any
) -> str:
    """The digest of this moment.

    Args:
        steps: Since the save.
        objects: Path to object: all that set-up has named.
        lost: Paths of those to which nothing leads any more; they are not saved, nor looked at.
        random_states: Of the sources of random numbers.
    """
    tensors = dict(_tensors({path: objects[path] for path in objects.keys() - lost}))
    paths = sorted(tensors)
    most = _TENSORS if steps <= _FIRST else _LATER_TENSORS
    chosen = paths[:: -(-len(paths) // most)] if paths else []
    exact = torch.are_deterministic_algorithms_enabled() or all(
        tensor.device.type == "cpu" for tensor in tensors.values()
    )
    found = {
        "random": hashlib.sha256(pickle.dumps(random_states, protocol=5)).hexdigest()[:16],
        "exact": exact,
        "lost": sorted(lost),
        "tensors": {path: _numbers(tensors[path]) for path in chosen},
    }
    return json.dumps(found)


def difference(before: str, now: str) -> str:
    """Differences between two digests of a step, in words; empty when there are none."""
    old, new = json.loads(before), json.loads(now)
    if old["random"] != new["random"]:
        return "the state of the random numbers"
    # What was lost was found by saves, which two lives do not make after the same steps.
    of_same_size = len(old["tensors"]) > _LATER_TENSORS or len(new["tensors"]) <= _LATER_TENSORS
    alike = old["lost"] == new["lost"] and of_same_size
    if alike and old["tensors"].keys() != new["tensors"].keys():
        return "which tensors there are"
    exact = old["exact"] and new["exact"]
    different = [
        path
        for path, tensor in new["tensors"].items()
        if path in old["tensors"] and not _same(old["tensors"][path], tensor, exact)
    ]
    if not different:
        return ""
    others = f" and {len(different) - 1} other tensors" if len(different) > 1 else ""
    return f"`{different[0]}`{others}"


def _tensors(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that training may change, by name."""
    for path, value in objects.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and _readable(value):
                yield path, value
        elif isinstance(value, torch.optim.Optimizer):
            states = list(value.state.values())
            for place, state in enumerate(states):
                for name, item in state.items() if isinstance(state, dict) else ():
                    if isinstance(item, torch.Tensor) and _readable(item):
                        yield f"{path}.state[{place}].{name}", item


def _readable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not hasattr(tensor, "__tensor_flatten__")
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )


def _numbers(tensor: torch.Tensor) -> tuple[int, float, float]:
    """Checksum, sum and sum of the sizes of some of a tensor's numbers."""
    flat = tensor.detach().view(-1)
    some = flat[:: -(-flat.numel() // _NUMBERS)].cpu().contiguous()
    wide = some.double()
    check = zlib.crc32(some.view(torch.uint8).numpy().tobytes())
    return check, float(wide.sum()), float(wide.abs().sum())


def _same(old: Any, new: Any, exact: bool) -> bool:
    if exact:
        return bool(old[0] == new[0])
    return all(
        abs(one - other) <= _TOLERANCE * max(old[2], new[2])
        for one, other in zip(old[1:], new[1:], strict=True)
    )
