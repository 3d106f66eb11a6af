"""Replica groups of torchft, each a forked process with a Manager of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.errors import OutlastError
from outlast.recover.live import Lighthouse, state_digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BATCH = 12
DEADLINE_SECONDS = 90.0
# A loaded machine lets heartbeats wait for a second.
HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True)
class Plan:
    """How a group trains.

    Attributes:
        steps: Of the run.
        kept: Where the state is kept; None: nowhere.
        every: Steps between two checkpoints.
        fault: Text of a fault, as `outlast drill` takes it.
        killed_at: Kill this process once so many steps are committed.
        returning: Given to `kept_state`.
        known: Given to `kept_state`.
        seed: Of the first weights.
        waits_for: Begin when this file is there.
        ends_with: Train on, past `steps`, until this file is there.
        waits_for_quorum: Whether the Manager waits for each quorum before the passes.
    """

    steps: int = 12
    kept: Path | None = None
    every: int = 4
    fault: str = ""
    killed_at: int = -1
    returning: bool = False
    known: int = 0
    seed: int = 0
    waits_for: Path | None = None
    ends_with: Path | None = None
    waits_for_quorum: bool = False


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: Any, step: int, index: int, count: int) -> torch.Tensor:
    """Of one group's share of a step's batch; the groups' mean is that of the batch."""
    rows = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(step))
    mine = rows[BATCH * index // count : BATCH * (index + 1) // count]
    return ((model(mine[:, :8]) - mine[:, 8:]) ** 2).mean()


def reference(steps: int, seed: int = 0) -> torch.Tensor:
    """All weights of one process that is never disturbed, in one row."""
    model, optimizer = make(seed)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def group(number: int, address: str, out: Path, plan: Plan, together: Any) -> None:
    torch.set_num_threads(1)
    # What torchft logs is much, and this is a fork: the parent's pipe is not for it.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    with out.open("w", buffering=1) as file:

        def say(**content: Any) -> None:
            file.write(json.dumps(content) + "\n")

        try:
            _train(number, address, plan, say, together)
        except OutlastError as error:
            say(error=type(error).__name__, message=str(error))


def _train(number: int, address: str, plan: Plan, say: Any, together: Any) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    from outlast.guard import guard
    from outlast.guard.inject import inject, parse_faults
    from outlast.integrations.torchft import guarded_commit, kept_state

    model, optimizer = make(plan.seed)
    state = {"model": model, "optimizer": optimizer}

    def load(content: Any) -> None:
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {name: each.state_dict() for name, each in state.items()},
        min_replica_size=1,
        # Equal by their seed; a group that takes the first one's weights would sit out step 0.
        init_sync=False,
        use_async_quorum=not plan.waits_for_quorum,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{address}",
        replica_id=f"group{number}",
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(seconds=HEARTBEAT_SECONDS / 10),
    )
    handle = guard(model, optimizer)
    if plan.fault:
        inject(handle, parse_faults([plan.fault]), seed=0)
    if together is not None:
        # All are known to the lighthouse before one of them asks for a quorum.
        together.wait(DEADLINE_SECONDS)
    _wait_for(plan.waits_for)
    wrapped = DistributedDataParallel(manager, model)
    shared = Optimizer(manager, optimizer)
    with contextlib.ExitStack() as stack:
        if plan.kept is not None:
            kept = kept_state(
                manager,
                plan.kept,
                state,
                every=plan.every,
                known=plan.known,
                returning=plan.returning,
            )
            say(restored=stack.enter_context(kept))
        stack.enter_context(guarded_commit(manager, handle))
        while manager.current_step() < plan.steps or not _is_there(plan.ends_with):
            if manager.current_step() == plan.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            shared.zero_grad()
            # Both wait for the quorum, with which a group that is behind learns its step.
            index, count = manager.participating_rank(), manager.num_participants()
            step = manager.current_step()
            loss_of(wrapped, step, index or 0, count).backward()
            shared.step()
            committed = manager.current_step() > step
            digest = state_digest(state)
            say(step=step, share=[index, count], committed=committed, digest=digest)
    findings = [each.outcome for each in handle.ledger.findings]
    say(weights=flat(model).tolist(), findings=findings, reached=manager.current_step())
    manager.shutdown(wait=False)


def _is_there(file: Path | None) -> bool:
    return file is None or file.exists()


def _wait_for(file: Path | None) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not _is_there(file):
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.01)


@dataclass
class Life:
    """One start of a group."""

    process: Any
    out: Path

    def lines(self) -> list[dict[str, Any]]:
        if not self.out.exists():
            return []
        text = self.out.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def of(self, key: str) -> list[Any]:
        return [each[key] for each in self.lines() if key in each]

    def steps(self, *, committed: bool = True) -> list[int]:
        return [each["step"] for each in self.lines() if each.get("committed") is committed]

    def digests(self) -> dict[int, str]:
        """Of the state after each committed step."""
        return {each["step"]: each["digest"] for each in self.lines() if each.get("committed")}

    def weights(self) -> torch.Tensor:
        (found,) = self.of("weights")
        return torch.tensor(found)

    def wait_for(self, done: Any) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done(self):
            assert time.monotonic() < deadline, f"too late: {self.lines()[-5:]}"
            assert self.process.is_alive() or done(self), f"ended: {self.lines()[-5:]}"
            time.sleep(0.01)

    def end(self) -> int | None:
        self.process.join(DEADLINE_SECONDS)
        assert not self.process.is_alive(), f"hangs after {self.lines()[-3:]}"
        return self.process.exitcode


@dataclass
class Arena:
    """A lighthouse and the groups around it."""

    folder: Path
    lighthouse: Lighthouse
    lives: list[Life] = field(default_factory=list)

    def start(self, number: int, plan: Plan, together: Any = None) -> Life:
        out = self.folder / f"group{number}-{len(self.lives)}.jsonl"
        process = multiprocessing.get_context("fork").Process(
            target=group, args=(number, self.lighthouse.address, out, plan, together)
        )
        process.start()
        self.lives.append(Life(process, out))
        return self.lives[-1]

    def start_all(self, *plans: Plan) -> list[Life]:
        """Start group 0, 1, ... so that the first quorum has all of them."""
        together = multiprocessing.get_context("fork").Barrier(len(plans))
        return [self.start(number, plan, together) for number, plan in enumerate(plans)]


@contextlib.contextmanager
def arena(folder: Path) -> Iterator[Arena]:
    with Lighthouse(HEARTBEAT_SECONDS) as lighthouse:
        found = Arena(folder, lighthouse)
        try:
            yield found
        finally:
            for life in found.lives:
                if life.process.is_alive():
                    life.process.kill()
                life.process.join()
