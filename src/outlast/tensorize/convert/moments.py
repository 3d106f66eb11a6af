"""Second moments of layers' inputs, collected while calibration batches run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outlast.errors import TensorizeError


class InputMoments:
    """Collects E[x x^T] of the inputs of linear layers inside a ``with`` block.

    ::

        with InputMoments(model, match="*.mlp.*") as moments, torch.no_grad():
            for batch in batches:
                model(batch)
        factors = low_rank_for_inputs(layer.weight, moments[name], rank=64)

    Sums are float64 on the layer's device: 8 in^2 bytes a layer, 134 MB at 4096 features, or 8 in
    bytes with `diagonal`. Modules that read the same tensor are each counted.

    Args:
        model: The model whose `nn.Linear` layers are watched.
        match: Pattern or patterns of module names (as of a shell); any fitting one counts.
        diagonal: Collect E[x^2] of every feature only.

    Raises:
        TensorizeError: Where no linear layer has a matching name; and, from the model's forward,
            for inputs that are not finite.
    """

    def __init__(
        self, model: nn.Module, *, match: str | Sequence[str] = "*", diagonal: bool = False
    ) -> None:
        patterns = (match,) if isinstance(match, str) else tuple(match)
        self._layers: dict[str, nn.Linear] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not self._layers:
            raise TensorizeError(f"match = {match!r} fits the name of no nn.Linear in the model")
        self._diagonal = diagonal
        self._sums: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(self._layers, 0)
        self._handles: list[RemovableHandle] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers that are watched."""
        return tuple(self._layers)

    @property
    def tokens(self) -> Mapping[str, int]:
        """Rows that each layer has read so far."""
        return dict(self._tokens)

    def __getitem__(self, name: str) -> Tensor:
        """Second moment of a layer's input: (in, in), or (in,) where `diagonal`; float64.

        Raises:
            TensorizeError: For a layer that is not watched or has read nothing.
        """
        return self._sums[self._read(name)] / self._tokens[name]

    def mean(self, name: str) -> Tensor:
        """Mean of a layer's input: (in,) float64.

        Raises:
            TensorizeError: For a layer that is not watched or has read nothing.
        """
        return self._means[self._read(name)] / self._tokens[name]

    def _read(self, name: str) -> str:
        if name not in self._layers:
            raise TensorizeError(f"no inputs are collected of {name!r}: it does not fit `match`")
        if not self._tokens[name]:
            raise TensorizeError(
                f"{name!r} has read no input yet: run calibration batches inside the with block"
            )
        return name

    def __enter__(self) -> InputMoments:
        for name, layer in self._layers.items():
            self._handles.append(
                layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            self._add(name, (arguments[0] if arguments else named["input"]).detach())

        return add

    # Sums made in inference mode could not be added to outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _add(self, name: str, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if not rows.shape[0]:
            return
        wide = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)
        mean = wide.sum(0)
        if not bool(torch.isfinite(mean).all()):
            raise TensorizeError(f"an input of {name!r} is not finite: calibrate on a sound model")
        moment = wide.square().sum(0) if self._diagonal else wide.mT @ wide
        if name in self._sums:
            self._sums[name].add_(moment)
            self._means[name].add_(mean)
        else:
            self._sums[name], self._means[name] = moment, mean
        self._tokens[name] += rows.shape[0]
