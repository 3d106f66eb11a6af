"""The section [checkpoint]: when to save, where, and how fast copies may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outlast.job.section import Count, Positive, Section, setting

MegabytesPerSecond = Annotated[float, Field(ge=0.0)]


class CheckpointSection(Section):
    """When to save, and how much to keep."""

    every_steps: Count | Literal["auto"] = setting(
        100,
        'steps between checkpoints; 0: only at the end; "auto": as often as is best, from the '
        "measured cost of a save and the expected failures",
        identity=False,
    )
    mtbf_hours: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        'for "auto": mean time between failures of the whole job; 0: a published figure per node',
        identity=False,
    )
    slowdown_budget: Annotated[float, Field(gt=0.0, le=1.0)] = setting(
        0.035, 'for "auto": largest share of the time that saves may cost', identity=False
    )
    longest_minutes: Annotated[float, Field(gt=0.0)] = setting(
        30.0, 'for "auto": longest time between checkpoints', identity=False
    )
    keep: Positive = setting(3, "newest checkpoints kept", identity=False)
    keep_every: Count = setting(
        0, "also keep the checkpoints of all multiples of this step; 0: none", identity=False
    )
    keep_best: Count = setting(
        0, "also keep this many with the lowest validation loss; 0: none", identity=False
    )
    asynchronous: bool = setting(
        True, "write in the background; training goes on after the state is copied", identity=False
    )
    writer: Literal["process", "thread"] = setting(
        "process",
        "who codes and writes: a process of its own, or a thread, which starts at once but "
        "disturbs training a little",
        identity=False,
    )
    when_busy: Literal["wait", "skip", "replace"] = setting(
        "wait",
        "when a checkpoint is due while the one before is still being written: wait for that, "
        "skip the new one, or give up the old one",
        identity=False,
    )
    turns: str = setting(
        "",
        "folder in which your jobs take turns at saving to one file system, so that they do not "
        "slow each other down: a due save waits for its turn while training goes on; empty: "
        "save when due",
        identity=False,
    )
    turn_seconds: Annotated[float, Field(ge=0.0)] = setting(
        300.0, "save without a turn after so long a wait", identity=False
    )
    turn_order: Literal["least-waste", "fcfs", "set-10"] = setting(
        "least-waste",
        "who of those that wait is next, the same for all jobs of the folder: who keeps the others "
        "waiting least for each node of its own; who came first; or one at a time of each class of "
        "periods, classes side by side",
        identity=False,
    )
    turn_load: Annotated[float, Field(gt=0.0, lt=1.0)] = setting(
        0.6,
        'for "auto" with checkpoint.turns: largest share of the time, below 1, for which the saves '
        "of all jobs of the folder, this one too, may keep the file system busy",
        identity=False,
    )
    turn_ask_slurm: bool = setting(
        True,
        "ask Slurm whether the job of a silent holder on another node has ended, in place of "
        "waiting 90 s for its next sign of life",
        identity=False,
    )
    timeout_seconds: Annotated[float, Field(gt=0.0)] = setting(
        1800.0, "longest wait for the storage or another process", identity=False
    )
    compression: Literal["auto", "zstd", "lz4", "lz4hc", "zlib", "none"] = setting(
        "auto", "lossless codec; auto: the smallest measured, lz4: fast", identity=False
    )
    replay: Literal["off", "bf16", "exact"] = setting(
        "off",
        'also log every step\'s gradient, so that a restart loses no step: "exact" as it is; '
        '"bf16" 2.5 times smaller, and the optimizer sees the rounded gradient',
    )
    delta_chain: Annotated[int, Field(ge=0, le=512)] = setting(
        0,
        "checkpoints in a row stored as differences to the one before: smaller, slower to "
        "restore, a second copy of the state in host memory; 0: each in full",
        identity=False,
    )

    fast: str = setting(
        "",
        "a faster place that is saved to first, e.g. /dev/shm or a node's own disk; checkpoints "
        "are then copied on to the run's directory in the background",
        identity=False,
    )
    fast_private: bool = setting(
        False, "whether nodes do not see each other's files in checkpoint.fast", identity=False
    )
    fast_keep: Positive = setting(1, "newest checkpoints kept in checkpoint.fast", identity=False)
    drain_every: Positive = setting(
        5, "with checkpoint.fast: every how many-th checkpoint is copied on", identity=False
    )
    drain_megabytes_per_s: MegabytesPerSecond = setting(
        0.0,
        "with checkpoint.fast: most that a process writes to the run's directory when checkpoints "
        "are copied on; 0: no limit",
        identity=False,
    )
    mirror: str = setting(
        "",
        "a safer place that checkpoints are copied on to, a directory or any fsspec URL such as "
        "s3://bucket/runs",
        identity=False,
    )
    mirror_every: Positive = setting(
        10, "with checkpoint.mirror: every how many-th checkpoint is copied on", identity=False
    )
    mirror_megabytes_per_s: MegabytesPerSecond = setting(
        0.0, "most that a process writes to checkpoint.mirror; 0: no limit", identity=False
    )
    back_off: bool = setting(
        False,
        "copies of checkpoints find their rate below these limits: a little more while they get "
        "what they ask for, half of what they get when others want it too",
        identity=False,
    )
    transfer_plan: str = setting(
        "",
        "file for `outlast cluster tasks` that plans this run, its tiers named run and mirror: "
        "copies of checkpoints and of data then take the bandwidth that the plan gives them, in "
        "its order; empty: no plan",
        identity=False,
    )
