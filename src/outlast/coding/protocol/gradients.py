"""Gradients of chunks: flat buffers, fingerprints, interruption and random numbers.

Two computations of one chunk are compared by fingerprints. The projection of x, cut into rows of a
fixed width, is sum_ij u_i v_j x_ij with random signs u and v: every number counts with weight 1 or
-1, so a single wrong number always shows, and the square of a projection of an error e is |e|^2 on
average (a product of Rademacher vectors).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle


PROJECTIONS = 4


_WIDTH = 1024


@dataclass(frozen=True)
class Fingerprint:
    """The norm of a gradient and its projections on random signs.

    Attributes:
        numbers: The 2-norm, then `PROJECTIONS` projections.
    """

    numbers: tuple[float, ...]

    def text(self) -> str:
        """As short text."""
        return ",".join(float(number).hex() for number in self.numbers)

    @classmethod
    def read(cls, text: str) -> Fingerprint:
        """The inverse of `text`."""
        return cls(tuple(float.fromhex(part) for part in text.split(",")))

    def difference(self, other: Fingerprint) -> float:
        """Root mean square difference of the projections, as a share of the larger norm.

        An estimate of ``|x - y| / |x|``; infinite where one of them is not finite. Where both are
        not, the data made them so, and nothing is said: 0.
        """
        ours, theirs = np.array(self.numbers), np.array(other.numbers)
        finite = np.isfinite(ours).all(), np.isfinite(theirs).all()
        if not all(finite):
            return math.inf if any(finite) else 0.0
        norm = max(ours[0], theirs[0])
        if norm == 0:
            return 0.0
        gap = max(abs(ours[0] - theirs[0]), float(np.sqrt(np.mean((ours - theirs)[1:] ** 2))))
        return float(gap / norm)


class Fingerprints:
    """Takes fingerprints of lists of tensors; the signs are equal on all processes."""

    def __init__(self) -> None:
        self._signs: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        """The fingerprint of tensors of any shapes, on one device; reads each number once."""
        parts = [
            self._of(tensor.detach().reshape(-1), place) for place, tensor in enumerate(tensors)
        ]
        total = torch.stack(parts).sum(0)
        total[0] = total[0].sqrt()
        return Fingerprint(tuple(total.tolist()))

    def _of(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        """Sum of squares and projections of one flat tensor, float64."""
        if flat.dtype in {torch.float16, torch.bfloat16}:
            flat = flat.float()
        rows, rest = divmod(flat.numel(), _WIDTH)
        columns, lines = self._draw(place, rows + 1, flat.device)
        columns = columns.to(flat.dtype)
        square = torch.linalg.vector_norm(flat).double().square()
        body = flat[: rows * _WIDTH].view(rows, _WIDTH) @ columns
        tail = flat[rows * _WIDTH :] @ columns[:rest]
        projected = (body.double() * lines[:rows]).sum(0) + tail.double() * lines[rows]
        return torch.cat([square.reshape(1), projected])

    def _draw(
        self, place: int, rows: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (place, rows, device)
        if key not in self._signs:
            generator = np.random.PCG64([place, rows])
            columns, lines = _signs(generator, _WIDTH), _signs(generator, rows)
            self._signs[key] = (
                torch.tensor(columns, dtype=torch.float32, device=device),
                torch.tensor(lines, dtype=torch.float64, device=device),
            )
        return self._signs[key]


def _signs(generator: np.random.PCG64, lines: int) -> npt.NDArray[np.float64]:
    """(lines, PROJECTIONS) of 1 and -1, from raw bits, which all versions of numpy draw alike."""
    bits = generator.random_raw((lines, PROJECTIONS)) >> np.uint64(63)
    return np.where(bits == 1, 1.0, -1.0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FlatGradients:
    """A sum of gradients, apart from the parameters' own ``grad``.

    Args:
        parameters: The trained parameters, in an order that is equal on all processes; the local
            shards of distributed ones.

    Attributes:
        buffers: Flat tensors with everything; collectives work on these.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            groups.setdefault((parameter.dtype, parameter.device), []).append(number)
        self.buffers: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(self.parameters)
        for (dtype, device), numbers in groups.items():
            sizes = [local(self.parameters[number]).numel() for number in numbers]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self.buffers.append(buffer)
            for number, piece in zip(numbers, torch.split(buffer, sizes), strict=True):
                self.views[number] = piece.view_as(local(self.parameters[number]))

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def zero_(self) -> None:
        """Set everything to 0."""
        for buffer in self.buffers:
            buffer.zero_()

    def copy_(self, other: FlatGradients) -> None:
        """Take over the numbers of `other`, made from the same parameters."""
        for buffer, theirs in zip(self.buffers, other.buffers, strict=True):
            buffer.copy_(theirs)

    def plus_(self, other: FlatGradients) -> None:
        """Add the numbers of `other`, made from the same parameters."""
        for buffer, theirs in zip(self.buffers, other.buffers, strict=True):
            buffer.add_(theirs)

    def add_(self, weight: float = 1.0) -> None:
        """Add `weight` times the parameters' gradients, where they have any."""
        pairs = [
            (view, local(parameter.grad))
            for view, parameter in zip(self.views, self.parameters, strict=True)
            if parameter.grad is not None
        ]
        if pairs:
            views, gradients = zip(*pairs, strict=True)
            torch._foreach_add_(list(views), list(gradients), alpha=weight)

    def mul_(self, factor: float) -> None:
        """Multiply everything."""
        if factor != 1.0:
            for buffer in self.buffers:
                buffer.mul_(factor)

    @torch.no_grad()
    def write_back(self) -> None:
        """Make these sums the parameters' gradients; they share memory until the next `zero_`."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if isinstance(parameter, DTensor):
                parameter.grad = DTensor.from_local(
                    view,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            else:
                parameter.grad = view


class ReplicaGroup:
    """The processes of one replica: a process alone, or a sharded replica's.

    Args:
        group: The replica's processes; None for a process alone.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.leads = self.rank == 0

    def told(self, answer: Callable[[], Any]) -> Any:
        """Return the leader's `answer`; the others wait for it and do not ask themselves.

        Raises:
            Exception: On all of them, what the leader's `answer` raises.
        """
        if self.size == 1:
            return answer()
        box: list[Any] = [None]
        if self.leads:
            try:
                box = [answer()]
            except Exception as error:
                box = [error]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]


class Abandoned(Exception):  # noqa: N818 - a way out, not an error
    """Leaves a forward or backward pass; caught where the chunk was begun."""


class Interrupt:
    """Question between layers: whether the computation is still wanted.

    The question is put before each layer's forward pass and after each parameter's gradient, so a
    slow process learns within a layer's time that the others have done its work. It is never put
    inside a compiled module, and outside `listening` it costs a check of a flag.

    Args:
        model: Its layers are the elements of module lists and sequences, or, where it has none, its
            modules without children.
        unwanted: Whether the result is no longer wanted.
    """

    def __init__(self, model: nn.Module, unwanted: Callable[[], bool]) -> None:
        self._question = _Question(unwanted)
        self._handles: list[RemovableHandle] = []
        for layer in _layers(model):
            self._handles.append(layer.register_forward_pre_hook(self._question))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(self._question)  # type: ignore[no-untyped-call]
                )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Ask while the context is open.

        Raises:
            Abandoned: Out of the pass in it, when the result is unwanted.
        """
        self._question.asked = True
        try:
            yield
        finally:
            self._question.asked = False

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Question:
    """The hook; a copy of it, in a copied or saved model, asks nothing."""

    def __init__(self, unwanted: Callable[[], bool] | None = None) -> None:
        self._unwanted = unwanted
        self.asked = False

    def __call__(self, *arguments: Any) -> None:
        if self.asked and self._unwanted is not None and self._unwanted():
            raise Abandoned

    def __reduce__(self) -> tuple[type[_Question], tuple[()]]:
        return (_Question, ())


def _layers(model: nn.Module) -> list[nn.Module]:
    # A hook inside a compiled graph would be traced into it. torch.compile(module) gives a wrapper,
    # module.compile() changes the module's call.
    inside = {
        id(child)
        for module in model.modules()
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        for child in module.modules()
    }
    modules = [module for module in model.modules() if id(module) not in inside]
    layers = [
        layer
        for module in modules
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for layer in module
        if id(layer) not in inside
    ]
    return layers or [module for module in modules if not any(module.children())]


def key(*numbers: int) -> int:
    """A 63-bit seed from integers, equal on all machines."""
    text = ",".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def keyed(seed: int, step: int, chunk: int) -> Iterator[None]:
    """Draw torch's random numbers (dropout) from (seed, step, chunk) inside, leave them as before.

    Covers the CPU's generator and that of the current CUDA device.
    """
    # torch.manual_seed would note a call, with a stack trace, for each device not yet in use.
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(key(seed, step, chunk))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class ChunkGradients:
    """Computes chunks one after the other, and adds up those that count.

    Two flat buffers: the gradient of the chunk at hand, and the sum. The parameters' gradients lie
    in the first.

    Args:
        model: The model; its parameters' gradients are computed.
        team: The processes that compute it together.
        seed: Of random numbers inside chunks.
        unwanted: Whether a chunk that is being computed would come too late; asked between layers
            where the process is alone in its team.

    Raises:
        CodingError: Where there is nothing to train.
    """

    def __init__(
        self, model: nn.Module, team: ReplicaGroup, *, seed: int, unwanted: Callable[[], bool]
    ) -> None:
        self._team, self._seed = team, seed
        self._sums = FlatGradients(model.parameters())
        if not self._sums.buffers:
            raise CodingError("the model has no parameter that requires a gradient")
        self._chunk = FlatGradients(model.parameters())
        self._fingerprints = Fingerprints()
        # Layers of a team's processes wait for each other: none may leave in the middle.
        self._interrupt = Interrupt(model, unwanted) if team.size == 1 else None

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self._sums.buffers[0].device

    @property
    def dtype(self) -> str:
        """Type of the (first) gradients."""
        return str(self._sums.buffers[0].dtype).removeprefix("torch.")

    def compute(
        self, step: int, chunk: int, loss_of: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, Fingerprint]:
        """Both passes of a chunk, to their end also on a device that runs behind the host.

        Raises:
            Abandoned: When the chunk is no longer wanted.
        """
        self._chunk.zero_()
        self._chunk.write_back()
        place = chunk * self._team.size + self._team.rank
        listening = (
            contextlib.nullcontext() if self._interrupt is None else self._interrupt.listening()
        )
        with keyed(self._seed, step, place), listening:
            loss = loss_of(chunk)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), self._fingerprints.take(self._chunk.buffers)

    def count(self, *, first: bool) -> None:
        """Add the chunk at hand to the sum, which begins with the first."""
        if first:
            self._sums, self._chunk = self._chunk, self._sums
        else:
            self._sums.plus_(self._chunk)

    def buffers(self, *, empty: bool) -> list[torch.Tensor]:
        """A copy of the sum for a collective; the sum itself stays for another one.

        Args:
            empty: Whether no chunk was counted.
        """
        if empty:
            self._sums.zero_()
        self._chunk.copy_(self._sums)
        return self._chunk.buffers

    def give_up(self) -> None:
        """Do without the buffers of a collective that has failed and may still write to them."""
        self._chunk = FlatGradients(self._sums.parameters)

    def like(self) -> list[torch.Tensor]:
        """Buffers of zeros of the same shapes."""
        return FlatGradients(self._sums.parameters).buffers

    def finish(self, scale: float) -> None:
        """Make the collective's result, scaled, the parameters' gradients."""
        self._chunk.mul_(scale)
        self._chunk.write_back()

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._interrupt is not None:
            self._interrupt.remove()
