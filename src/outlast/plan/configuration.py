"""Training configuration of a transformer: sizes, parallel layout, and what is traded for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from outlast.errors import PlanError

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
"""What the data-parallel ranks divide among themselves: ZeRO 0, 1, 2, 3 (FSDP is 3)."""
Schedule = Literal["1f1b", "interleaved", "zero_bubble", "gpipe"]
Recompute = Literal["none", "attention", "full"]
Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Balance = Literal["layers", "cost"]
Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to run.

    Attributes:
        data: Data-parallel replicas or shards; with `sharding_ranks` fewer than this, the rest are
            replicas (HSDP).
        tensor: Ranks that divide each matrix.
        sequence_parallel: Norms and dropout divided along the sequence by the tensor ranks.
        context: Ranks that divide each sequence.
        pipeline: Stages on different ranks.
        stages_per_rank: Of an interleaved schedule.
        schedule: Order of forward and backward passes.
        balance: Blocks per stage: as equal a number as possible, or as equal a cost as possible
            where embedding and head count.
        expert: Ranks that divide the experts; they are taken from the data-parallel ranks.
        sharding: What the data-parallel ranks divide.
        sharding_ranks: Ranks of one sharding group; 0 for all of `data`.
        sequence: Tokens of one sample.
        micro_batch: Samples of one pass on one replica.
        batch: Samples of one optimizer step, over all replicas.
        recompute: What is computed again in the backward pass in place of being kept.
        precision: Of the matrix products.
        gradient_bytes: Of one value of a gradient that is summed over micro-batches.
        fused_attention: A kernel that does not write the scores to memory.
        loss_bytes: Of one logit as the loss keeps it.
        optimizer: Of the hidden matrices.
    """

    data: int = 1
    tensor: int = 1
    sequence_parallel: bool = True
    context: int = 1
    pipeline: int = 1
    stages_per_rank: int = 1
    schedule: Schedule = "1f1b"
    balance: Balance = "layers"
    expert: int = 1
    sharding: Sharding = "none"
    sharding_ranks: int = 0
    sequence: int
    micro_batch: int
    batch: int
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    gradient_bytes: int = 4
    fused_attention: bool = True
    loss_bytes: int = 4
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        counts = ("data", "tensor", "context", "pipeline", "stages_per_rank", "expert")
        sizes = ("sequence", "micro_batch", "batch", "gradient_bytes", "loss_bytes")
        for field in (*counts, *sizes):
            if getattr(self, field) < 1:
                raise PlanError(f"{field} = {getattr(self, field)}: give at least 1")
        for field, known in (
            ("schedule", Schedule),
            ("sharding", Sharding),
            ("recompute", Recompute),
            ("precision", Precision),
            ("balance", Balance),
            ("optimizer", Optimizer),
        ):
            if getattr(self, field) not in get_args(known):
                raise PlanError(
                    f"{field} = {getattr(self, field)!r} is none of {', '.join(get_args(known))}"
                )
        if not 0 <= self.sharding_ranks <= self.data:
            raise PlanError(
                f"sharding_ranks = {self.sharding_ranks} is not in 0 to data = {self.data}"
            )

    @property
    def devices(self) -> int:
        """Accelerators that it takes."""
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Passes of one replica in one step, rounded up."""
        return -(-self.batch // (self.data * self.micro_batch))

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.batch * self.sequence


_SHARDED = {"none": "DDP", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "FSDP"}


def layout_words(run: Configuration) -> str:
    """A layout in the field's abbreviations, e.g. ``8,192 GPU · TP 8 · PP 16x4 · DP 64 FSDP``."""
    parts = [f"{run.devices:,} GPU"]
    if run.tensor > 1:
        parts.append(f"TP {run.tensor}" + ("" if run.sequence_parallel else " without SP"))
    if run.pipeline > 1:
        chunks = f"x{run.stages_per_rank}" if run.stages_per_rank > 1 else ""
        schedule = {"zero_bubble": " zero-bubble", "gpipe": " GPipe"}.get(run.schedule, "")
        balance = " by cost" if run.balance == "cost" else ""
        parts.append(f"PP {run.pipeline}{chunks}{schedule}{balance}")
    if run.context > 1:
        parts.append(f"CP {run.context}")
    if run.expert > 1:
        parts.append(f"EP {run.expert}")
    if run.data > 1:
        grouped = 0 < run.sharding_ranks < run.data
        group = f" in groups of {run.sharding_ranks}" if grouped else ""
        parts.append(f"DP {run.data:,} {_SHARDED[run.sharding]}{group}")
    parts.append(f"micro-batch {run.micro_batch}")
    if run.recompute != "none":
        parts.append(f"recompute {run.recompute}")
    parts.append(run.precision)
    return " · ".join(parts)
