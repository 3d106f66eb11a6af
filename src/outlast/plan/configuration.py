"""Configuration of a training: sizes and layout, and one choice of each mechanism beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product
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


MEMORY_FOLDERS = ("/dev/shm", "/run/shm")
"""Folders that a node keeps in its memory."""
TIERS = ("memory", "peer", "local", "shared")
"""Where a checkpoint can go, from the fastest to the safest; see `outlast.plan.cluster.Storage`."""
MODES = ("off", "restart", "live")
"""How a run continues without a checkpoint; see [recover] of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Recovery without a checkpoint, as `outlast.recover` does it.

    Attributes:
        mode: One of `MODES`. restart: nodes keep the state in memory; live: replica groups
        continue.
        every_steps: Steps from one kept state to the next.
        parity: Nodes of a group that may be lost together; None: 1 where a node holds what no
            other does, else 0.
        parity_group: Nodes that share their parity, at most.
        heartbeat_seconds: Silence after which a live group counts as dead.
    """

    mode: str = "off"
    every_steps: int = 1
    parity: int | None = None
    parity_group: int = 8
    heartbeat_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"recovery = {self.mode!r} is none of {', '.join(MODES)}")
        if self.every_steps < 1:
            raise PlanError(f"recovery every_steps = {self.every_steps}: give at least 1")
        if self.parity not in (None, 0, 1, 2):
            raise PlanError(f"recovery parity = {self.parity}: give 0, 1 or 2, or leave it out")
        if self.parity_group < 2:
            raise PlanError(f"recovery parity_group = {self.parity_group}: give at least 2")
        if not (math.isfinite(self.heartbeat_seconds) and self.heartbeat_seconds > 0.0):
            raise PlanError(
                f"recovery heartbeat_seconds = {self.heartbeat_seconds}: give a number above 0"
            )

    def __str__(self) -> str:
        """As a user gives it: ``off``, ``restart``, ``restart:1``, ``live``."""
        return self.mode if self.parity is None else f"{self.mode}:{self.parity}"

    @classmethod
    def of(cls, text: str) -> Recovery:
        """The recovery that `text` names: a mode, for restart with the parity behind a colon.

        Raises:
            PlanError: It names none.
        """
        mode, _, parity = text.partition(":")
        if parity not in ("", "0", "1", "2") or (parity and mode != "restart"):
            raise PlanError(
                f"recovery = {text!r}: give off, restart, live, or restart with its parity, as in "
                "restart:1"
            )
        return cls(mode=mode, parity=int(parity) if parity else None)


NO_RECOVERY = Recovery()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One choice of each mechanism; the defaults leave all of them out but plain checkpoints.

    Attributes:
        checkpoint_seconds: Between two saves of the tier that saves most often; 0 for the interval
            with the least waste.
        tiers: Some of `TIERS`, from the fastest to the safest.
        guard: A level of `outlast.guard`: off, light, linear or full.
        audit: Share of the time for its audits, at every level but off.
        coding_copies: Holders of each gradient chunk; 1 without coding.
        tensorize_form: A form of `outlast.tensorize`; dense where layers stay as they are.
        tensorize_rank: Rank as a share of the full one; 0 for a dense form.
        clock_mhz: Of the devices; 0 for the one they choose themselves.
        recovery: How it continues without a checkpoint.
    """

    checkpoint_seconds: float = 0.0
    tiers: tuple[str, ...] = ("shared",)
    guard: str = "off"
    audit: float = 0.0
    coding_copies: int = 1
    tensorize_form: str = "dense"
    tensorize_rank: float = 0.0
    clock_mhz: float = 0.0
    recovery: Recovery = NO_RECOVERY

    def __post_init__(self) -> None:
        for field in ("checkpoint_seconds", "audit", "tensorize_rank", "clock_mhz"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0.0):
                raise PlanError(f"{field} = {value}: give a number of at least 0")
        if self.coding_copies < 1:
            raise PlanError(f"coding_copies = {self.coding_copies}: give at least 1")
        places = [TIERS.index(tier) for tier in self.tiers if tier in TIERS]
        if not self.tiers or len(places) < len(self.tiers) or places != sorted(set(places)):
            raise PlanError(
                f"tiers = {', '.join(self.tiers) or 'none'}: give some of {', '.join(TIERS)}, each "
                "once, in this order"
            )
        if (self.tensorize_form == "dense") != (self.tensorize_rank == 0.0):
            raise PlanError(
                f"tensorize_rank = {self.tensorize_rank:g} does not go with tensorize_form = "
                f"{self.tensorize_form!r}: a dense form has rank 0, all others more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """The choices of each mechanism; all their combinations are searched.

    Attributes:
        checkpoint_seconds: As in `Settings`, as the next ones.
        tiers: Each choice is some of `TIERS`.
        guard: Levels.
        audit: Shares of the time.
        coding_copies: Holders of each chunk.
        tensorize: Form and rank.
        clock_mhz: Clocks.
        recovery: Ways to continue without a checkpoint.
    """

    checkpoint_seconds: tuple[float, ...] = (0.0,)
    tiers: tuple[tuple[str, ...], ...] = (("shared",),)
    guard: tuple[str, ...] = ("off",)
    audit: tuple[float, ...] = (0.0,)
    coding_copies: tuple[int, ...] = (1,)
    tensorize: tuple[tuple[str, float], ...] = (("dense", 0.0),)
    clock_mhz: tuple[float, ...] = (0.0,)
    recovery: tuple[Recovery, ...] = (NO_RECOVERY,)

    @classmethod
    def of(cls, settings: Settings) -> Mechanisms:
        """The only choice of each mechanism."""
        names = [field.name for field in fields(cls) if field.name != "tensorize"]
        form = settings.tensorize_form, settings.tensorize_rank
        return cls(**{name: (getattr(settings, name),) for name in names}, tensorize=(form,))

    def settings(self) -> tuple[Settings, ...]:
        """All combinations, each once.

        Raises:
            PlanError: A mechanism has no choice, or one that `Settings` refuses.
        """
        choices = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, values in choices.items():
            if not values:
                raise PlanError(f"{name} has no choice to search: give at least one")
        found = []
        for values in product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            form, rank = chosen.pop("tensorize")
            found.append(Settings(**chosen, tensorize_form=form, tensorize_rank=rank))
        return tuple(dict.fromkeys(found))


def settings_words(settings: Settings) -> str:
    """The mechanisms that are in use."""
    every = (
        f"every {settings.checkpoint_seconds / 60:.3g} min"
        if settings.checkpoint_seconds
        else "at the best interval"
    )
    parts = [f"checkpoint {every} to {' + '.join(settings.tiers)}"]
    recovery = settings.recovery
    if recovery.mode == "live":
        parts.append("live groups")
    elif recovery.mode == "restart":
        steps = "step" if recovery.every_steps == 1 else f"{recovery.every_steps} steps"
        parity = "" if recovery.parity is None else f", parity {recovery.parity}"
        parts.append(f"memory every {steps}{parity}")
    if settings.guard != "off":
        parts.append(f"guard {settings.guard}")
    if settings.coding_copies > 1:
        parts.append(f"{settings.coding_copies} copies of gradients")
    if settings.tensorize_form != "dense":
        parts.append(f"{settings.tensorize_form} at {100 * settings.tensorize_rank:.3g} % rank")
    if settings.clock_mhz:
        parts.append(f"{settings.clock_mhz:,.0f} MHz")
    return " · ".join(parts)
