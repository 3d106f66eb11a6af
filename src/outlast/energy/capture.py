"""Work of a real training step: what each phase or operator computes, moves and launches.

works = capture(step, batch)            # {"forward": Work(...), "backward": ..., "tail": ...}

Runs the step once with whatever tensors it has, also fake or meta ones, so that no accelerator
is needed. Kernels inside a custom operator or a compiled region count as that one operator.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from outlast.energy.model import Work

if TYPE_CHECKING:
    from collections.abc import Callable

By = Literal["phase", "operator"]

# Allocation and bookkeeping: no kernel reads or writes anything.
_FREE = ("empty", "new_empty", "detach", "alias", "_local_scalar_dense", "wait_tensor", "barrier")
# Kernels that only write.
_WRITERS = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
_COLLECTIVES = ("_c10d_functional", "c10d")


def capture(
    step: Callable[..., object], *args: object, by: By = "phase", fused: bool = True
) -> dict[str, Work]:
    """Count the work of one step.

    Args:
        step: Runs forward, and backward and the optimizer if wanted.
        args: Of `step`.
        by: Sum by phase ("forward", "backward", "tail" for the optimizer), or by operator of a
            phase ("forward aten.mm").
        fused: Pointwise operators that only feed each other are one kernel, and what they pass on
            never reaches memory, as compilers and fused kernels do it.

    Returns:
        Work by phase or operator. FLOPs are those of matrix products, convolutions and attention
        by `torch.utils.flop_counter`; a multiply-add counts as 2.
    """
    counter = _Counter()
    with counter:
        step(*args)
    works: dict[str, Work] = defaultdict(lambda: Work(flops=0.0, memory_bytes=0.0))
    for one in counter.operations:
        works[one.phase if by == "phase" else f"{one.phase} {one.name}"] += one.work(fused)
    return dict(works)


@dataclass(eq=False)
class _Operation:
    """One call of a kernel.

    Attributes:
        reads: (who made it, bytes) of each input; None where it was there before the step.
        run: Number of the stretch of pointwise operators that it belongs to.
        consumers: Operations that read what this one wrote.
    """

    name: str
    phase: str
    flops: float
    link_bytes: float
    pointwise: bool
    written_bytes: float
    reads: list[tuple[_Operation | None, float]]
    run: int = 0
    consumers: list[_Operation] = field(default_factory=list)

    def joins(self, maker: _Operation | None) -> bool:
        """True if this one is fused with the maker of an input: nothing else runs between."""
        return maker is not None and self.pointwise and maker.run == self.run

    def work(self, fused: bool) -> Work:
        """Work that it adds, given the operations it can be fused with."""
        reads = sum(size for maker, size in self.reads if not (fused and self.joins(maker)))
        inside = [consumer.joins(self) for consumer in self.consumers] if fused else []
        kept = inside and all(inside)
        return Work(
            flops=self.flops,
            memory_bytes=reads + (0.0 if kept else self.written_bytes),
            link_bytes=self.link_bytes,
            launches=0 if any(inside) else 1,
        )


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators; knows who made a storage last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._makers: dict[int, _Operation] = {}
        self._had_backward = False
        self._runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name().split("::", 1)[1].split(".")[0]
        kind = name.removesuffix("_like")
        if not _is_view(func) and kind not in _FREE:
            collective = func.namespace in _COLLECTIVES
            inputs = () if kind in _WRITERS else _tensors((args, kwargs))
            made = _Operation(
                name=str(func.overloadpacket),
                phase=self._phase(),
                flops=float(_flops(func, args, kwargs, result)),
                link_bytes=_link_bytes(name, args, result) if collective else 0.0,
                pointwise=torch.Tag.pointwise in func.tags,
                written_bytes=float(sum(map(_bytes, _tensors(result)))),
                reads=[(self._makers.get(_storage(read)), _bytes(read)) for read in inputs],
            )
            last = self.operations[-1] if self.operations else None
            goes_on = last is not None and last.pointwise and last.phase == made.phase
            self._runs += not (made.pointwise and goes_on)
            made.run = self._runs
            for maker, _ in made.reads:
                if maker is not None:
                    maker.consumers.append(made)
            self._makers.update(dict.fromkeys(map(_storage, _tensors(result)), made))
            self.operations.append(made)
        return result

    def _phase(self) -> str:
        if torch._C._current_graph_task_id() >= 0:
            self._had_backward = True
            return "backward"
        # Optimizers run without gradients, after a backward.
        return "tail" if self._had_backward and not torch.is_grad_enabled() else "forward"


def _is_view(func: Any) -> bool:
    """True if the result shares memory with an input and nothing is written."""
    aliases = [
        return_.alias_info for return_ in func._schema.returns if return_.alias_info is not None
    ]
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    )
    return bool(aliases) and not writes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> float:
    """Bytes that are touched: an expanded tensor is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= 1 if stride == 0 else size
    return float(count * tensor.element_size())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = func.overloadpacket
    # The CPU kernels of attention are missing in torch's table.
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        shapes = [argument.shape for argument in args[:3]]
        return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        shapes = [argument.shape for argument in args[:4]]
        return float(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


def _link_bytes(name: str, args: Any, result: Any) -> float:
    """Bytes that leave this device, by ring algorithms for collectives.

    All-reduce sends 2 (n - 1) / n of its data, all-gather, reduce-scatter and all-to-all (n - 1) /
    n of their larger side (Thakur et al., 2005), send its tensor, receive nothing.
    """
    size = max(sum(_bytes(tensor) for tensor in _tensors(side)) for side in (*args, result))
    if name.startswith("recv"):
        return 0.0
    if name == "send":
        return size
    ranks = _ranks(args)
    twice = 2.0 if name.replace("_", "").startswith("allreduce") else 1.0
    return twice * (ranks - 1) / ranks * size


def _ranks(args: Any) -> int:
    """Of the process group among the arguments of a collective."""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    for argument in reversed(args):
        if isinstance(argument, str):
            try:
                return _resolve_process_group(GroupName(argument)).size()
            except (ValueError, RuntimeError, LookupError):
                continue  # The name of the reduction, not of the group.
        if isinstance(argument, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(argument).size()
            except RuntimeError:
                continue  # A reduction boxed likewise.
    return 1
