"""FSDP2 for layers of small cores: no empty shards.

`fully_shard` cuts the first dimension into chunks of equal size. A core of shape (1, 8, 30) then
lies on rank 0 alone, every other rank has an empty shard, and since chunks are padded, p times the
core is gathered and the optimizer's work is rank 0's. So such a core is cut along another dimension
that divides evenly, which FSDP2 does without padding. Where none does, the core is tiny or
oddly shaped: it stays whole on every rank, outside FSDP, and its gradient is averaged; all of those
travel in one all-reduce per backward pass. Small cores that can be cut are cut: FSDP2 gathers all
parameters of a unit in one collective, so their number costs no launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from outlast.tensorize.sharded import shown_in, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


def leaves_empty(length: int, ranks: int) -> bool:
    """Return whether equal chunks along a dimension of this length leave some ranks without any."""
    chunk = -(-length // ranks)
    return chunk * (ranks - 1) >= length


def sharded_dimension(shape: Sequence[int], ranks: int) -> int | None:
    """The dimension to cut, so that every rank has a part.

    Args:
        shape: Of a parameter.
        ranks: Number of shards.

    Returns:
        The first dimension, if it leaves no rank empty; else the next that divides evenly; None if
        there is none, as for a scalar, which FSDP2 refuses to shard.
    """
    if shape and not leaves_empty(shape[0], ranks):
        return 0
    even = (place for place, length in enumerate(shape) if length and length % ranks == 0)
    return next(even, None)


def placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return the `shard_placement_fn` of `fully_shard` for shards over this many ranks.

    A parameter that tensor parallelism has split already is left to FSDP2's own choice.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        if isinstance(parameter, DTensor):
            return None
        dimension = sharded_dimension(parameter.shape, ranks)
        return None if dimension is None else Shard(dimension)

    return place


@dataclass
class WholeCores:
    """Parameters that every rank holds whole, and the averaging of their gradients.

    Args:
        parameters: Name -> parameter.
        mesh: The mesh of `fully_shard`: shard, or replicate x shard.
    """

    parameters: dict[str, nn.Parameter]
    mesh: DeviceMesh
    _pass: int = field(default=-1, init=False)
    _hooks: list[Any] = field(default_factory=list, init=False)

    @property
    def ignored(self) -> set[nn.Parameter]:
        """The `ignored_params` of `fully_shard`."""
        return set(self.parameters.values())

    def listen(self, model: nn.Module | None = None) -> None:
        """Average gradients at the end of every backward pass from now on.

        Averages are linear, so a pass that adds to gradients that are averaged already, as
        gradient accumulation does, averages their sum correctly.

        All ranks must average in the same passes. A rank whose tokens miss all of the parameters
        (an expert without tokens, a branch that was not taken) takes part by its `model`.

        Args:
            model: What is called on every rank: each backward pass through its output averages.
                None: only those in which one of the parameters gets a gradient on this rank.
        """
        if model is not None and any(
            parameter.requires_grad for parameter in self.parameters.values()
        ):
            self._hooks.append(model.register_forward_hook(self._called))
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _called(self, model: nn.Module, arguments: Any, output: Any) -> None:
        for item in tree_leaves(output):
            if isinstance(item, Tensor) and item.requires_grad:
                item.register_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, _: Tensor) -> None:
        # The number of the backward pass; one that was broken off leaves no state behind.
        current = torch._C._current_graph_task_id()
        if self._pass != current:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        average_gradients(self.parameters.values(), self.mesh)

    def cast(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Let layers see these parameters in `dtype`, as FSDP2's policy lets them see the others.

        The parameters, their gradients and their names stay as they are.

        Args:
            model: The model that they belong to, before `fully_shard`.
            dtype: That of FSDP2's `param_dtype`.
        """
        owned: dict[str, list[str]] = {}
        for name, parameter in self.parameters.items():
            owner, _, leaf = name.rpartition(".")
            if parameter.is_floating_point():
                owned.setdefault(owner, []).append(leaf)
        for owner, leaves in owned.items():
            layer = model.get_submodule(owner)
            seen = {leaf: shown_in(leaf, dtype) for leaf in leaves}
            own = type(layer)
            layer.__class__ = type(f"Cast{own.__name__}", (own,), seen)

    def close(self) -> None:
        """Average no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def average_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Replace gradients by their means over all ranks of a mesh, in one all-reduce per dimension.

    Sums are taken in the widest dtype of the parameters, float32 at least.

    All ranks must call this with the same parameters; a missing gradient counts as zeros where
    another rank has one, and stays missing where none has.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        return
    given = [parameter.grad is not None for parameter in wanted]
    pieces = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in wanted
    ]
    dtype = functools.reduce(torch.promote_types, (piece.dtype for piece in pieces), torch.float32)
    had = torch.tensor(given, dtype=dtype, device=pieces[0].device)
    flat = torch.cat([*(piece.reshape(-1).to(dtype) for piece in pieces), had])
    for dimension in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(dimension))
    flat /= mesh.size()
    *means, had = torch.split(flat, [*(piece.numel() for piece in pieces), len(wanted)])
    # Only a rank that lacks some waits for its device.
    anywhere = given if all(given) else (had > 0).tolist()
    for parameter, piece, mean, found in zip(wanted, pieces, means, anywhere, strict=True):
        if found:
            piece.copy_(mean.view_as(piece))
            parameter.grad = piece


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for DTensors and plain tensors together.

    torch's own refuses to mix them, and DTensors of different meshes or placements. Plain tensors
    are what every rank holds whole, with equal gradients, and count once.

    Args:
        parameters: Those of the model, sharded and whole; those without gradient are left out.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)), in place.
        norm_type: Which norm of all gradients together; may be infinite.

    Returns:
        The norm before, a scalar that is equal on all ranks; 0 without gradients.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        layout = None
        if isinstance(gradient, DTensor):
            layout = (id(gradient.device_mesh), gradient.placements)
        groups.setdefault(layout, []).append(gradient)
    norms = [whole(torch.nn.utils.get_total_norm(group, norm_type)) for group in groups.values()]
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0]) for norm in norms]), norm_type
    )
    # No branch on the value: no rank waits for its device.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        part.mul_(factor.to(part.device))
    return norm


def whole_cores(model: nn.Module, mesh: DeviceMesh, *, small_bytes: int = 0) -> WholeCores:
    """The parameters that FSDP2 should not shard over this mesh.

    Args:
        model: Before it is sharded.
        mesh: The mesh of `fully_shard`: shard, or replicate x shard.
        small_bytes: Parameters below this size stay whole in any case, in bytes.

    Returns:
        What to ignore; call `listen` on it, once.
    """
    ranks = mesh.size(mesh.ndim - 1)
    kept = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor)
        and (
            parameter.numel() * parameter.element_size() < small_bytes
            or sharded_dimension(parameter.shape, ranks) is None
        )
    }
    return WholeCores(kept, mesh)


def shard_tensorized(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Iterable[nn.Module] = (),
    small_bytes: int = 0,
    policy: MixedPrecisionPolicy | None = None,
) -> WholeCores:
    """`fully_shard` of every unit and then the model, without empty shards.

    Args:
        model: A model with structured layers.
        mesh: Shard, or replicate x shard.
        units: Modules that are gathered one at a time, such as transformer blocks.
        small_bytes: Parameters below this size stay whole in any case, in bytes.
        policy: FSDP2's mixed precision; it holds for parameters that stay whole as well.

    Returns:
        The parameters that stay whole: plain tensors. An optimizer with ``foreach=True`` or
        ``fused=True`` needs them in a group of their own, since its kernels do not mix the two,
        and so does ``torch.nn.utils.clip_grad_norm_``: clip by `clip_gradients`. Gradients are
        averaged in every backward pass through the output of `model`, so that no rank waits for
        one that has none for them.
    """
    cores = whole_cores(model, mesh, small_bytes=small_bytes)
    cores.listen(model)
    place = placement(mesh.size(mesh.ndim - 1))
    policy = policy or MixedPrecisionPolicy()
    if policy.param_dtype is not None:
        cores.cast(model, policy.param_dtype)
    for unit in (*units, model):
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=place,
            ignored_params=cores.ignored,
        )
    return cores
