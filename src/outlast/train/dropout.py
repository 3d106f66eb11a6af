"""Dropout whose masks belong to samples, not to ranks.

torch draws dropout masks from a generator on every rank, so another number of ranks or another
micro-batch size would drop other units. Here the mask of an element is a pure function of
(seed, step, global sample index, block, call within the block, position in the sample): a counter
hashed to 32 bits. A run therefore drops the same units on any number of processes, with any
micro-batch, under pipelining and when activations are recomputed.

`SampleDropout` is a ``TorchFunctionMode``: while it is active it answers every call of
``torch.nn.functional.dropout`` (which nn.Dropout and Hugging Face's attention make).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

_MASK32 = 0xFFFFFFFF

# Further functions that draw from torch's generator, with the place of their probability.
_DRAWING: dict[object, tuple[int, str]] = {
    functional.scaled_dot_product_attention: (4, "dropout_p"),
    functional.multi_head_attention_forward: (10, "dropout_p"),
    functional.alpha_dropout: (1, "p"),
    functional.feature_alpha_dropout: (1, "p"),
    functional.dropout1d: (1, "p"),
    functional.dropout2d: (1, "p"),
    functional.dropout3d: (1, "p"),
}


class SampleDropout(TorchFunctionMode):
    """Answers dropout calls for the samples of one micro-batch.

    Args:
        seed: The run's seed.
        step: The optimizer step.
        sample_ids: (samples,) int64, global sample indices along the first dimension of every
            tensor that is dropped.
    """

    def __init__(self, seed: int, step: int, sample_ids: torch.Tensor) -> None:
        super().__init__()
        self.seed, self.step, self.sample_ids = seed, step, sample_ids
        self.block = 0
        self.call = 0
        self.used = 0

    def enter_block(self, index: int) -> None:
        """Count the calls of block `index` (from 1) from zero."""
        self.block, self.call = index, 0

    def again(self) -> SampleDropout:
        """A fresh mode for the same samples, for recomputation."""
        return SampleDropout(self.seed, self.step, self.sample_ids)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func in _DRAWING:
            place, name = _DRAWING[func]
            probability = kwargs.get(name, args[place] if len(args) > place else 0.0)
            if probability > 0 and kwargs.get("training", True):
                _refuse(func)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        samples = len(self.sample_ids)
        if input.ndim == 0 or input.shape[0] != samples:
            raise OutlastError(
                f"the model drops units of a tensor of shape {tuple(input.shape)}, whose first "
                f"dimension is not the {samples} samples of the micro-batch, so masks cannot "
                "belong to samples; drop before reshaping, or set that dropout to 0"
            )
        key = _mix(_mix(_mix(self.seed) ^ self.step) ^ (self.block << 16) ^ self.call)
        self.call += 1
        self.used += 1
        with torch._C.DisableTorchFunction():
            keep = uniform(key, self.sample_ids.to(input.device), input.shape) >= p
            dropped = input * keep.to(input.dtype) / (1.0 - p if p < 1.0 else 1.0)
            return input.copy_(dropped) if inplace else dropped


def _refuse(func: object) -> None:
    if func is functional.scaled_dot_product_attention:
        raise OutlastError(
            "the model drops attention weights inside the fused kernel, where masks cannot "
            'belong to samples; set model.attention = "eager", or the attention dropout to 0'
        )
    raise OutlastError(
        f"the model drops units in torch.nn.functional.{func.__name__}, where masks cannot "  # type: ignore[attr-defined]
        "belong to samples; use torch.nn.functional.dropout, or set that dropout to 0"
    )


def uniform(key: int, sample_ids: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Pseudo-random numbers in [0, 1), a function of `key`, sample and position alone.

    Args:
        key: 32-bit key.
        sample_ids: (samples,) int64.
        shape: (samples, ...) of the result.

    Returns:
        float32 tensor of `shape`, from the 32-bit finaliser "lowbias32" (Wellons 2018) applied to
        the position after the sample's key.
    """
    per_sample = shape[1:].numel()
    low = _mix_tensor((sample_ids & _MASK32) ^ key)
    sample_key = _mix_tensor(low ^ (sample_ids >> 32 & _MASK32)).unsqueeze(1)
    position = torch.arange(per_sample, device=sample_ids.device).unsqueeze(0)
    bits = _mix_tensor(_mix_tensor(position & _MASK32) ^ sample_key ^ (position >> 32))
    return ((bits >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


def _mix_tensor(bits: torch.Tensor) -> torch.Tensor:
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _MASK32
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _MASK32
    return bits ^ (bits >> 16)


def _mix(bits: int) -> int:
    """The same finaliser on a Python integer of any size (folded to 32 bits)."""
    while bits >> 32:
        bits = (bits & _MASK32) ^ _mix(bits >> 32)
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D & _MASK32
    bits ^= bits >> 15
    bits = bits * 0x846CA68B & _MASK32
    return bits ^ (bits >> 16)


class DropoutStream:
    """Gives every micro-batch its `SampleDropout`, and none once the model is seen to drop nothing.

    The first training micro-batch always runs under the mode. If no call with a probability above 0
    came, later ones run without it, so models without dropout pay nothing. With `never` the model
    is known to drop nothing (a compiled model would be compiled again for the mode).
    """

    def __init__(self, seed: int, blocks: Mapping[int, nn.Module], *, never: bool = False) -> None:
        self._seed = seed
        self._needed: bool | None = False if never else None
        self._active: SampleDropout | None = None
        for index, block in blocks.items():
            block.register_forward_pre_hook(self._marker(index))

    def _marker(self, index: int) -> Callable[[nn.Module, Any], None]:
        def mark(module: nn.Module, arguments: Any) -> None:
            if self._active is not None:
                self._active.enter_block(index)

        return mark

    def for_samples(self, step: int, sample_ids: torch.Tensor) -> AbstractContextManager[None]:
        """A context for the forward pass of these samples in training."""
        if self._needed is False:
            return contextlib.nullcontext()
        return self._activate(SampleDropout(self._seed, step, sample_ids), learn=True)

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The pair of contexts that ``torch.utils.checkpoint`` takes as ``context_fn``."""
        if self._active is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        return contextlib.nullcontext(), self._activate(self._active.again(), learn=False)

    @contextlib.contextmanager
    def _activate(self, mode: SampleDropout, *, learn: bool) -> Iterator[None]:
        before, self._active = self._active, mode
        try:
            with mode:
                yield
        finally:
            self._active = before
        if learn and self._needed is None:
            self._needed = mode.used > 0
