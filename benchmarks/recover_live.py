"""Live replica groups: do survivors survive, how soon do they step again, what does it cost?

    python benchmarks/recover_live.py [--quick] [--json FILE]

Two groups of one gloo process each train a small network; one of them, drawn by chance, is killed
with SIGKILL at a moment drawn by chance, and started again. The peer is torchft as its documents
show it: its Manager, its DistributedDataParallel, its optimizer wrapper, the same lighthouse.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from harness import Bar, arguments, at_least, at_most, median, publish
from torch import nn

from outlast.recover.live import SILENCE_SHARE, Lighthouse, LiveGroups, state_digest

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_SECONDS = 1.0
SAMPLES = 32
WIDTH = 256
PAUSE_SECONDS = 0.05
HANG_SECONDS = 30.0
STEADY_STEPS = 5
MILLIONS = 50


def network(width: int = WIDTH, layers: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, step: int, first: int, last: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)[first:last]
    time.sleep(PAUSE_SECONDS)
    return model(inputs).square().sum() / SAMPLES


def outlast_group(number: int, address: str, returning: bool, say: Callable[..., None]) -> None:
    model, optimizer = network()
    state = {"model": model, "optimizer": optimizer}
    with LiveGroups(
        state, group=number, lighthouse=address, returning=returning, awaits=1 if returning else 2
    ) as groups:
        for step in groups.steps(until=10**9):
            index, count = step.share
            first, last = SAMPLES * index // count, SAMPLES * (index + 1) // count
            first = last if step.idle else first
            loss = torch.zeros(())
            if not step.idle:
                loss = loss_of(model, step.number, first, last)
                loss.backward()
            if step.commit(loss.detach(), values=[last - first]):
                optimizer.step()
                digest = state_digest(state) if step.number % 10 == 0 else ""
                say(step.number, count, SAMPLES - step.sums[0], digest)
            optimizer.zero_grad()


def torchft_group(number: int, address: str, returning: bool, say: Callable[..., None]) -> None:
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer
    from torchft.process_group import ProcessGroupGloo

    model, optimizer = network()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(content: Any) -> None:
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{address}",
        replica_id=f"group{number}",
        hostname="127.0.0.1",
    )
    called = DistributedDataParallel(manager, model)
    wrapped = Optimizer(manager, optimizer)
    while True:
        wrapped.zero_grad()
        step = manager.current_step()
        half = SAMPLES // 2
        loss_of(called, step, half * number, half * (number + 1)).backward()
        wrapped.step()
        if manager.current_step() > step:
            count = manager.num_participants()
            say(step, count, SAMPLES - half * count, "")


@dataclass
class Group:
    """A process and what it has said: (time, step, groups, samples missing, digest)."""

    process: Any
    pipe: Any
    said: list[tuple[float, int, int, float, str]] = field(default_factory=list)

    def listen(self) -> None:
        """Take in what was said."""
        try:
            while self.pipe.poll():
                self.said.append(self.pipe.recv())
        except (EOFError, OSError, ValueError):
            return

    def alive(self) -> bool:
        """Whether the process runs."""
        return bool(self.process.is_alive())

    def await_step(self, wanted: Callable[[tuple[float, int, int, float, str]], bool]) -> Any:
        """The first thing said that is wanted; None when the process dies or hangs."""
        deadline = time.monotonic() + HANG_SECONDS
        seen = 0
        while time.monotonic() < deadline:
            alive = self.alive()
            self.listen()
            for each in self.said[seen:]:
                if wanted(each):
                    return each
            seen = len(self.said)
            if not alive:
                return None
            time.sleep(0.001)
        return None

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _main(work: Callable[..., None], number: int, address: str, returning: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    # torchft tells of every failure that it meets.
    os.dup2(devnull, 2)
    work(number, address, returning, lambda *said: pipe.send((time.monotonic(), *said)))


def start(work: Callable[..., None], number: int, address: str, returning: bool = False) -> Group:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(work, number, address, returning, theirs))
    process.start()
    theirs.close()
    return Group(process, ours)


@dataclass
class Found:
    """What the trials gave."""

    trials: int = 0
    survived: int = 0
    returned: int = 0
    seconds: list[float] = field(default_factory=list)
    missing: float = 0.0
    rejoin_steps: list[float] = field(default_factory=list)
    unequal: int = 0


def trials(work: Callable[..., None], count: int, heartbeat_seconds: float) -> Found:
    found, chance = Found(), random.Random(0)
    with Lighthouse(heartbeat_seconds) as lighthouse:
        groups: list[Group] = []
        for _ in range(count):
            if not groups:
                groups = [start(work, number, lighthouse.address) for number in range(2)]
            _trial(work, lighthouse.address, groups, chance, found)
        for each in groups:
            each.end()
    return found


def _trial(
    work: Callable[..., None],
    address: str,
    groups: list[Group],
    chance: random.Random,
    found: Found,
) -> None:
    found.trials += 1
    victim = chance.randrange(2)
    survivor = groups[1 - victim]
    survivor.said.clear()
    steady = survivor.await_step(lambda said: said[2] == 2 and len(survivor.said) >= STEADY_STEPS)
    if steady is None:
        raise RuntimeError("two groups did not train together before any was killed")
    step_seconds = median(_gaps(survivor))
    time.sleep(chance.uniform(0.0, 3 * PAUSE_SECONDS))
    groups[victim].process.kill()
    killed = time.monotonic()
    # One that all had voted for may still be finished; the next is the survivor's own.
    following = survivor.await_step(lambda said: said[0] > killed and said[2] == 1)
    if following is None:
        for each in groups:
            each.end()
        groups.clear()
        return
    found.survived += 1
    found.seconds.append(following[0] - killed)
    groups[victim].end()
    groups[victim] = back = start(work, victim, address, returning=True)
    joined = back.await_step(lambda said: True)
    if joined is not None and survivor.await_step(lambda said: said[1] > joined[1] + 1):
        found.returned += 1
        around = [each for each in survivor.said if abs(each[1] - joined[1]) <= 1]
        longest = max(_gaps_of([each[0] for each in around]))
        found.rejoin_steps.append(max(longest / step_seconds - 1.0, 0.0))
        back.await_step(lambda said: bool(said[4]))
        back.listen()
        mine = {each[1]: each[4] for each in survivor.said if each[4]}
        found.unequal += sum(mine.get(each[1], each[4]) != each[4] for each in back.said if each[4])
    found.missing += sum(each[3] for each in survivor.said if each[0] > killed)


def _gaps(group: Group) -> list[float]:
    return _gaps_of([each[0] for each in group.said])


def _gaps_of(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _steady(number: int, address: str, steps: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    width = 1024
    model, optimizer = network(width, round(MILLIONS * 1e6 / (width * width + width)))
    inputs = torch.randn(64, width)
    times = []
    with LiveGroups(
        {"model": model, "optimizer": optimizer}, group=number, lighthouse=address, awaits=2
    ) as groups:
        for _ in range(steps):
            begun = time.perf_counter()
            step = groups.begin()
            met = time.perf_counter()
            model(inputs).square().sum().backward()
            if step.commit():
                optimizer.step()
            optimizer.zero_grad()
            groups.end(step)
            times.append((met - begun, time.perf_counter() - begun))
    pipe.send(times)


def quorum_share(steps: int) -> float:
    """Seconds of a quorum over those of a step; of two groups, the later does not wait for one."""
    context = multiprocessing.get_context("fork")
    with Lighthouse(HEARTBEAT_SECONDS) as lighthouse:
        workers = []
        for number in range(2):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(
                target=_steady, args=(number, lighthouse.address, steps, theirs)
            )
            worker.start()
            theirs.close()
            workers.append((worker, ours))
        both = [pipe.recv() for _, pipe in workers]
        for worker, _ in workers:
            worker.join()
    later = [min(first[0], second[0]) for first, second in zip(*both, strict=True)]
    return median(later[1:]) / median([each[1] for each in both[0][1:]])


def live_bars(quick: bool) -> list[Bar]:
    """All rows of live recovery."""
    import torchft.checkpointing
    import torchft.process_group  # noqa: F401  (once for all forks)

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ours = trials(outlast_group, 3 if quick else 100, HEARTBEAT_SECONDS)
    # As shipped: the lighthouse waits for the whole heartbeat. And with as little patience.
    peer = trials(torchft_group, 2 if quick else 8, HEARTBEAT_SECONDS / SILENCE_SHARE)
    eager = trials(torchft_group, 2 if quick else 8, HEARTBEAT_SECONDS)

    def words(what: Found) -> str:
        seconds = f"{median(what.seconds):.2f} s" if what.seconds else "never"
        return f"{what.survived} of {what.trials} survive, {seconds}"

    against = (
        f"torchft's wrapper: {words(peer)}; with the lighthouse's patience of outlast "
        f"({SILENCE_SHARE:g} of the heartbeat): {words(eager)}"
    )
    worst = max(ours.seconds, default=HANG_SECONDS)
    lost = returns = "torchft's wrapper: no survivor"
    if peer.survived:
        lost = f"torchft's wrapper: {peer.missing / peer.survived:.0f} in each trial"
    if peer.rejoin_steps:
        returns = f"torchft's wrapper: {median(peer.rejoin_steps):.2f} steps"
    share = quorum_share(5 if quick else 30)
    return [
        at_least(
            f"live: survivors of {ours.trials} kills",
            ours.survived / ours.trials,
            "of trials",
            1.0,
            against,
        ),
        at_most("live: next step, median", median(ours.seconds), "s", 1.0, against),
        at_most("live: next step, worst", worst, "s", 1.0, against),
        at_most("live: samples lost", ours.missing, "samples", 0.0, lost),
        at_least(
            "live: groups that return", ours.returned / ours.trials, "of trials", 1.0, words(peer)
        ),
        at_most(
            "live: rejoin, cost to the others",
            median(ours.rejoin_steps),
            f"steps of {PAUSE_SECONDS:g} s",
            1.0,
            returns,
        ),
        at_most(
            "live: returned states that differ", float(ours.unequal), "states", 0.0, "equal bits"
        ),
        at_most(f"live: quorum at {MILLIONS}M parameters", share, "of step", 0.01, "the same step"),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    publish("recover", live_bars(options.quick), options.json, part=True)


if __name__ == "__main__":
    main()
