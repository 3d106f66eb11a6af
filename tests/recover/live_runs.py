"""Replica groups as forked processes that train a small model and may be killed in any phase."""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.errors import OutlastError
from outlast.recover import live as heal
from outlast.recover import quorum as reduce
from outlast.recover.live import Lighthouse, LiveGroups, SavedElsewhere, state_digest

BATCH = 12
DEADLINE_SECONDS = 90.0
# A loaded machine lets heartbeats wait for a second.
HEARTBEAT_SECONDS = 2.0
PHASES = ("data", "forward", "backward", "mid all-reduce", "vote", "before the step")


def require_torchft() -> None:
    """Skip without torchft; with it, load it once for all forks."""
    pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")
    import torchft.checkpointing
    import torchft.process_group  # noqa: F401


@dataclass(frozen=True)
class Fault:
    """Send `number` to oneself in `phase` of `step`."""

    phase: str
    step: int
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class Plan:
    """How a group trains."""

    steps: int = 12
    fault: Fault | None = None
    identity: str = "job"
    returning: bool = False
    known: int = 0
    saved: Path | None = None
    seed: int = 0
    step_seconds: float = 0.01
    timeout_seconds: float = 30.0
    bad: tuple[int, ...] = ()
    awaits: int = 1
    stop: Path | None = None
    rests: bool = False
    host: str = "127.0.0.1"
    interface: str = ""
    parts: int = 0


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def samples(step: int, index: int, count: int) -> list[int]:
    first = step * BATCH
    return list(range(first + BATCH * index // count, first + BATCH * (index + 1) // count))


def batch(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.randn(9, generator=torch.Generator().manual_seed(each)) for each in numbers]
    table = torch.stack(rows)
    return table[:, :8], table[:, 8:]


def loss_of(model: torch.nn.Module, numbers: list[int]) -> torch.Tensor:
    inputs, targets = batch(numbers)
    return ((model(inputs) - targets) ** 2).sum() / BATCH


def reference(steps: int, seed: int = 0) -> list[float]:
    """Losses of one process that is never disturbed."""
    model, optimizer = make(seed)
    losses = []
    for step in range(steps):
        loss = loss_of(model, samples(step, 0, 1))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def group(number: int, address: str, out: Path, plan: Plan) -> None:
    torch.set_num_threads(1)
    if plan.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = plan.interface
    reduce.BUCKET_BYTES = 256
    model, optimizer = make(plan.seed)
    with out.open("w", buffering=1) as file:

        def say(**content: Any) -> None:
            file.write(json.dumps(content) + "\n")

        try:
            _train(number, address, plan, model, optimizer, say)
        except OutlastError as error:
            say(error=str(error))


def _saved_elsewhere(
    plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> SavedElsewhere | None:
    if plan.saved is None:
        return None
    place = plan.saved

    def newest() -> int:
        return int(torch.load(place)["step"]) if place.exists() else 0

    def restore() -> int:
        content = torch.load(place)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return int(content["step"])

    return SavedElsewhere(newest, restore)


def _train(
    number: int,
    address: str,
    plan: Plan,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Any,
) -> None:
    state = {"model": model, "optimizer": optimizer}
    current = [0]

    def at(phase: str) -> None:
        if plan.fault is not None and (plan.fault.phase, plan.fault.step) == (phase, current[0]):
            say(fault=phase, time=time.monotonic())
            current[0] = -1
            os.kill(os.getpid(), plan.fault.number)

    _watch_sums(at)
    _watch_transfers(at)
    with LiveGroups(
        state,
        group=number,
        lighthouse=address,
        identity=plan.identity,
        saved_elsewhere=_saved_elsewhere(plan, model, optimizer),
        known=plan.known,
        returning=plan.returning,
        awaits=plan.awaits,
        host=plan.host,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        timeout_seconds=plan.timeout_seconds,
        parts=plan.parts,
    ) as groups:
        refused = 0
        for step in groups.steps(until=plan.steps):
            current[0] = step.number if current[0] >= 0 else -1
            at("data")
            numbers = samples(step.number, *step.share)
            passes = not (plan.rests and step.idle)
            time.sleep(plan.step_seconds)
            at("forward")
            loss = loss_of(model, numbers) if passes else torch.zeros(())
            at("backward")
            if plan.parts:
                optimizer.zero_grad()
                for part in step.parts:
                    own = loss_of(model, samples(step.number, part, plan.parts))
                    own.backward()
                    step.add(part, own.detach())
                    at("after a part")
            elif passes:
                loss.backward()
            good = step.number not in plan.bad or refused >= 2
            refused += not good
            wishes = [float(plan.stop is not None and plan.stop.exists())]
            if step.commit(loss.detach(), good=good, values=wishes):
                at("before the step")
                optimizer.step()
                say(
                    step=step.number,
                    share=step.share,
                    samples=numbers,
                    loss=step.loss,
                    time=time.monotonic(),
                )
            optimizer.zero_grad()
            if groups.writes and plan.saved is not None and step.committed:
                content = {
                    "step": step.number + 1,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(content, plan.saved.with_suffix(".new"))
                plan.saved.with_suffix(".new").replace(plan.saved)
            for event in groups.news():
                say(event=event.kind, **event.__dict__)
            if step.committed and step.sums[0]:
                break
        say(digest=state_digest(state))


def _watch_sums(at: Any) -> None:
    """Call `at` within the sums: once the first bucket is under way, and before the vote."""
    plain = reduce.Connections.sum
    wait = reduce.Connections._await
    calls = [0]

    def summed(self: Any, tensors: Any) -> None:
        calls[0] = 0
        if len(tensors) == 1 and tensors[0].dtype == torch.float64:
            at("vote")
        plain(self, tensors)

    def awaited(self: Any, work: Any) -> None:
        if calls[0] == 1:
            at("mid all-reduce")
        calls[0] += 1
        wait(self, work)

    reduce.Connections.sum = summed
    reduce.Connections._await = awaited


def _watch_transfers(at: Any) -> None:
    plain = heal.Transfer.fetch

    def fetch(self: Any, *arguments: Any) -> Any:
        at("heal")
        return plain(self, *arguments)

    heal.Transfer.fetch = fetch


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

    def steps(self) -> list[dict[str, Any]]:
        return [each for each in self.lines() if "share" in each]

    def of(self, key: str) -> list[Any]:
        return [each[key] for each in self.lines() if key in each]

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

    def start(self, number: int, plan: Plan) -> Life:
        out = self.folder / f"group{number}-{len(self.lives)}.jsonl"
        process = multiprocessing.get_context("fork").Process(
            target=group, args=(number, self.lighthouse.address, out, plan)
        )
        process.start()
        self.lives.append(Life(process, out))
        return self.lives[-1]


@contextlib.contextmanager
def arena(folder: Path) -> Any:
    with Lighthouse(HEARTBEAT_SECONDS) as lighthouse:
        found = Arena(folder, lighthouse)
        try:
            yield found
        finally:
            for life in found.lives:
                if life.process.is_alive():
                    life.process.kill()
                life.process.join()


def assert_like_reference(life: Life, steps: int) -> None:
    """Every step once, in order, each with the loss of the whole batch: no sample is missing."""
    done = life.steps()
    assert [each["step"] for each in done] == list(range(steps))
    for each, loss in zip(done, reference(steps), strict=True):
        assert each["loss"] == pytest.approx(loss, rel=1e-4), each
