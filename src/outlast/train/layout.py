"""Parallel layout: the degree of every kind of parallelism, and the device mesh of it.

Mesh axes, outermost first: pipeline, replicate, shard, tensor. Neighbouring ranks are on the
innermost axis, so tensor-parallel peers, which talk most, are next to each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.job import ParallelSection

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Layout:
    """The degree of every kind of parallelism; their product is the number of processes."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of processes that see different samples."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Index of the share of a batch, of `data_ranks`, that `rank` works on."""
        return rank // self.tensor % self.data_ranks

    def pipeline_rank(self, rank: int) -> int:
        """Index of the pipeline stage that `rank` holds."""
        return rank // (self.tensor * self.data_ranks)

    def tensor_rank(self, rank: int) -> int:
        """Index of the part of every matrix that `rank` holds."""
        return rank % self.tensor

    def counts_loss(self, rank: int) -> bool:
        """True if `rank` is the one of its peers whose loss is summed: the last stage's first."""
        return self.tensor_rank(rank) == 0 and self.pipeline_rank(rank) == self.pipeline - 1

    def to_dict(self) -> dict[str, int]:
        """The degrees by axis name."""
        return asdict(self)


def resolve_layout(parallel: ParallelSection, world_size: int) -> Layout:
    """The layout for `world_size` processes; `replicate` = 0 takes what the others leave over.

    Raises:
        OutlastError: When the degrees do not multiply to `world_size`.
    """
    fixed = parallel.pipeline * parallel.shard * parallel.tensor
    replicate = parallel.replicate or max(world_size // fixed, 1)
    layout = Layout(parallel.pipeline, replicate, parallel.shard, parallel.tensor)
    if layout.world_size == world_size:
        return layout
    product = " x ".join(f"parallel.{axis} = {degree}" for axis, degree in layout.to_dict().items())
    raise OutlastError(
        f"{product} needs {layout.world_size} processes, but {world_size} "
        f"{'was' if world_size == 1 else 'were'} started; "
        f"start {layout.world_size} (--nproc {layout.world_size}) or change the degrees"
    )


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The device mesh of `layout`, with all four axes named, also those of degree 1."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(layout.to_dict()[axis] for axis in AXES)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
