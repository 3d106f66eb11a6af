"""Buffers in memory: one changed bit is found and put right from a copy.

A program may write to its buffers at any time, and kernels do so without a trace in torch's
counters. So a change counts as a fault only if it is one of a single bit, and only while nobody
should change the buffer: from the end of a step to the beginning of the next one; and through a
step's passes, too, where those of the last step have left it as it was. Counters (integers of one
element) are left out: they may change by one bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase

from outlast.guard.residual import same_content
from outlast.guard.scrubber import flat, local
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from outlast.guard.findings import Outcome
    from outlast.guard.watch import Watch


@dataclass
class _Buffer:
    """One buffer, and its content as of the last look.

    Attributes:
        name: In the model.
        holder: The module that holds it.
        key: Its name there.
        copy: (bytes,) uint8 of what it was.
        writes: Changed when a program had written to it, or put another in its place.
        steady: Whether the last step's passes have left it as it was.
    """

    name: str
    holder: nn.Module
    key: str
    copy: Tensor | None = None
    writes: tuple[int, int] = (0, 0)
    steady: bool = False

    def memory(self) -> tuple[Tensor | None, tuple[int, int]]:
        """Its content, None where that cannot be compared, and its `writes` now."""
        held = self.holder._buffers.get(self.key)
        if held is None:
            return None, (0, 0)
        if held.numel() == 1 and not (held.is_floating_point() or held.is_complex()):
            return None, (0, 0)
        numbers = flat(local(held))
        if numbers is None:
            return None, (0, 0)
        version = 0 if held.is_inference() else held._version
        return numbers.view(torch.uint8), (numbers.data_ptr(), version)


class KeptBuffers:
    """Buffers of a model as they are now, for passes that may have to begin anew.

    Those of DTensor and of inference mode are not among them.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, key, buffer, buffer.clone())
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference() and not is_dtensor(buffer)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put those back that have changed, or were replaced."""
        for module, key, buffer, content in self._kept:
            if not same_content(buffer, content):
                buffer.copy_(content)
            module._buffers[key] = buffer


class BufferWatch:
    """Looks at all buffers of a model around its steps.

    Args:
        watch: What all checks of the guard share.
        model: Guarded.
    """

    def __init__(self, watch: Watch, model: nn.Module) -> None:
        self._watch = watch
        # Whether no pass was begun since `note`.
        self._rests = False
        self._buffers = [
            _Buffer(f"{path}.{key}" if path else key, module, key)
            for path, module in model.named_modules()
            for key in module._buffers
        ]

    @torch.no_grad()
    def note(self) -> None:
        """A step is done, or all was loaded: keep what is there now."""
        self._rests = True
        pairs = []
        for buffer in self._buffers:
            content, buffer.writes = buffer.memory()
            if content is None or buffer.copy is None or buffer.copy.shape != content.shape:
                buffer.copy = None if content is None else content.clone()
                buffer.steady = False
            else:
                pairs.append((buffer, content, buffer.copy))
        for (buffer, content, copy), changed in zip(pairs, _differ(pairs), strict=True):
            buffer.steady = not (changed or isinstance(buffer.holder, _NormBase))
            if changed:
                copy.copy_(content)

    def begin(self) -> None:
        """The passes of a step begin: nobody should have changed anything since `note`."""
        if self._rests:
            self._look(self._buffers, used=False)
        self._rests = False

    def before_step(self) -> None:
        """The passes of a step are done: they change some buffers, and others never."""
        self._rests = False
        self._look([buffer for buffer in self._buffers if buffer.steady], used=True)

    @torch.no_grad()
    def _look(self, buffers: Sequence[_Buffer], *, used: bool) -> None:
        watch, pairs = self._watch, []
        for buffer in buffers:
            content, writes = buffer.memory()
            copy = buffer.copy
            if content is not None and copy is not None and writes == buffer.writes:
                pairs.append((buffer, content, copy))
        for (buffer, content, copy), changed in zip(pairs, _differ(pairs), strict=True):
            site = watch.ledger.site(buffer.name, "buffer.rest")
            if not changed:
                site.add(1, 0.0, 0.0, 0.0)
                continue
            places = (content ^ copy).nonzero().flatten()
            if len(places) != 1 or int(content[places] ^ copy[places]).bit_count() != 1:
                # Somebody has written to it, by ways that torch does not count.
                buffer.steady = False
                copy.copy_(content)
                continue
            site.exceeded += 1
            outcome: Outcome = "detected"
            if watch.policy.correct:
                content.copy_(copy)
                outcome = "corrected"
            watch.find(site, content.device, 1, math.inf, outcome)
            if used and watch.policy.correct:
                # What the passes have computed with it is wrong.
                watch.spoil(watch.step)


def _differ(pairs: Sequence[tuple[_Buffer, Tensor, Tensor]]) -> list[bool]:
    """Return for each content and copy whether they differ; a device is waited for once."""
    flags = [torch.any(content != copy) for _, content, copy in pairs]
    found: dict[int, bool] = {}
    for device in {flag.device for flag in flags}:
        own = [number for number, flag in enumerate(flags) if flag.device == device]
        values = torch.stack([flags[number] for number in own]).tolist()
        found |= dict(zip(own, values, strict=True))
    return [found[number] for number in range(len(flags))]
