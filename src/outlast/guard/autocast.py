"""Weights as autocast casts them: once per region, for all their uses.

Inside one ``torch.autocast`` region torch casts a parameter once and keeps the copy, so the
gradients of several uses (a layer called twice, two layers with one weight) are summed in the low
precision and cast back once. A checked layer casts by itself and must do the same to keep the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_kept: dict[tuple[int, torch.dtype], tuple[object, Tensor, Tensor]] = {}
_probes: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}


def region(device: str, dtype: torch.dtype) -> object:
    """What is the same object for as long as autocast keeps its copies on `device`.

    torch does not tell where a region begins. But it casts this parameter anew in every region, by
    a node of the graph that a region's calls share.
    """
    probe = _probes.get((device, dtype))
    if probe is None:
        factors = torch.zeros((2, 1), dtype=dtype, device=device)
        parameter = torch.zeros((1, 1), device=device, requires_grad=True)
        probe = _probes[device, dtype] = (parameter, factors[:0].t(), factors[:0])
    # A sum without terms: nothing is computed, and nothing saved for the backward pass.
    node = torch.addmm(*probe).grad_fn
    return None if node is None else node.next_functions[0][0]


def cast(parameter: Tensor, dtype: torch.dtype, within: object) -> Tensor:
    """`parameter` in `dtype`, the same tensor for every use in the region `within`.

    As torch, keeps copies only of float32 leaves that get a gradient.
    """
    keeps = (
        within is not None
        and parameter.requires_grad
        and parameter.is_leaf
        and parameter.dtype == torch.float32
        and torch.is_autocast_cache_enabled()
    )
    if not keeps:
        return parameter if parameter.dtype == torch.float64 else parameter.to(dtype)
    key = (id(parameter), dtype)
    found = _kept.get(key)
    if found is not None and found[0] is within:
        return found[2]
    if found is not None:
        # Of a region that has ended.
        forget()
    copy = parameter.to(dtype)
    _kept[key] = (within, parameter, copy)
    return copy


def forget() -> None:
    """Let go of all copies: a backward pass has begun, so their gradients are on their way."""
    _kept.clear()
