"""The section [recover]: how a run goes on after a failure without a file checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outlast.job.section import Count, Positive, Section, setting

Seconds = Annotated[float, Field(gt=0.0)]


class RecoverSection(Section):
    """How a run goes on after a failure without a file checkpoint."""

    mode: Literal["off", "restart", "live"] = setting(
        "restart",
        "restart: a failed group of processes starts again and takes the last step's state from "
        "memory; live: survivors go on with the dead ones' share (needs the extra ft); "
        "off: from the newest checkpoint",
        identity=False,
    )
    every_steps: Positive = setting(
        1, "restart: keep the state in memory after every so many steps", identity=False
    )
    memory: str = setting(
        "/dev/shm",
        "restart: directory in each node's memory (tmpfs) that outlives a process",
        identity=False,
    )
    parity: Literal["auto", 0, 1, 2] = setting(
        "auto",
        "restart: how many of a group of nodes may be lost together with their memory; auto: 1 "
        "where a node holds what no other holds, else 0",
        identity=False,
    )
    parity_group: Annotated[int, Field(ge=2, le=255)] = setting(
        8, "nodes that share their parity, at most", identity=False
    )
    domain: Literal["node", "process"] = setting(
        "node", "what is lost together: a node, or each process by itself", identity=False
    )
    groups: Count = setting(
        0, "live: replica groups; 0: one for each of parallel.replicate", identity=False
    )
    lighthouse: str = setting(
        "",
        "live: host:port of torchft's lighthouse; empty: outlast train starts one itself",
        identity=False,
    )
    heartbeat_seconds: Seconds = setting(
        1.0, "live: a group that is silent for so long counts as dead", identity=False
    )
    fixed_order: bool = setting(
        False,
        "live: sum the gradients of micro-batches in one order, whoever computes them, so that the "
        "weights do not depend on deaths to the last bit; slow, for drills",
        identity=False,
    )
    hang_seconds: Literal["auto"] | Annotated[float, Field(ge=0.0)] = setting(
        "auto",
        "a step that takes longer counts as hung: stacks are written to the run's directory, and "
        "the process ends itself; auto: from the measured steps; 0: never",
        identity=False,
    )
