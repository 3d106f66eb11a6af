"""Chains of links: gaps and lost steps on a real local Slurm, the lead of the last save, waste.

    python benchmarks/cluster_chain.py [--quick] [--json FILE]

The Slurm rows need root and the packages slurmctld, slurmd, slurm-client and munge; without them
they say so. The lead is simulated, since a thousand ends of links of eight hours cannot be waited
for; save times are drawn anew, with seeds and spreads that nothing was chosen by.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import Bar, arguments, at_most, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "slurm"))

ENDS = 1000
LINK_SECONDS = 8 * 3600.0
GAP_BAR_SECONDS = 3.5
MISSED_BAR = 0.01
TAIL_BAR = 1.3
WASTE_BAR = 0.01


def bars(quick: bool) -> list[Bar]:
    """All bars of this part."""
    costs, found = slurm_bars(quick)
    return [*found, *lead_bars(), *waste_bars(costs)]


@dataclass(frozen=True)
class Measured:
    """What links of the benchmark's own run needed; medians, seconds."""

    start_seconds: float
    gap_seconds: float
    save_seconds: float
    tail_seconds: float


def slurm_bars(quick: bool) -> tuple[Measured | None, list[Bar]]:
    """A chain of the main job, malleable, on eight virtual nodes of this machine."""
    from local_slurm import LocalSlurm, missing

    names = ("link gap, longest", "steps lost at planned ends", "steps done twice or never")
    if (reason := missing()) is not None:
        return None, [Bar(name, None, "", "", False, reason) for name in names]
    links = 3 if quick else 6
    with tempfile.TemporaryDirectory(prefix="chain-") as folder:
        root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        with LocalSlurm(root) as slurm:
            os.environ["SLURM_CONF"] = str(slurm.conf)
            return _chain(Path(folder), links)


def _chain(folder: Path, links: int) -> tuple[Measured | None, list[Bar]]:
    from outlast.cluster.chain import status_of
    from outlast.cluster.chain_files import chain_files, run_log
    from outlast.records import AttemptEnded, StepsDone, read_run

    each = 12
    settings = [
        f"run.directory={json.dumps(str(folder))}",
        "run.name=chain",
        f"train.steps={each * links}",
        f"train.stop_after_steps={each}",
        "train.batch_size=12",
        "checkpoint.every_steps=0",
        "log.every_steps=1",
        "sample.tokens=0",
        "export.huggingface=false",
        "evaluate.samples=12",
        "evaluate.every_steps=0",
        "slurm.nodes=[4, 2, 3]",
        "schedule.warmup_steps=2",
        "slurm.wall_time=30min",
    ]
    outlast = [sys.executable, "-m", "outlast"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*outlast, "submit", *settings], check=True, env=environment)
    files = chain_files((folder / "chain").resolve())
    deadline = time.monotonic() + 150.0 * links
    while (status := status_of(files)).outcome in ("running", "waiting"):
        if time.monotonic() > deadline:
            raise SystemExit(f"the chain is not done: {status}")
        time.sleep(1.0)
    run = read_run(files.run)
    steps = [event.step for _, event in run.of(StepsDone)]
    wrong = len(steps) - len(set(steps)) + len(set(range(1, each * links + 1)) - set(steps))
    lost = sum(
        max(before.last_step - after.first_step, 0)
        for before, after in zip(status.links, status.links[1:], strict=False)
    )
    peer = f"{links} links on 4, 2, then 3 virtual nodes, outcome {status.outcome}"
    log = run_log(files)
    ended = [record.time for record, _ in run.of(AttemptEnded)]
    # From the trainer's last record to the script's end, its report and summary among them.
    ends = [float(entry["time"]) for entry in _entries(files, "ended")]
    tails = [end - last for end, last in zip(ends, ended, strict=False)]
    begun = [float(entry["time"]) - float(entry["began"]) for entry in _entries(files, "started")]
    measured = Measured(
        start_seconds=_median(log.restart_seconds) + _median(begun),
        gap_seconds=_median(status.gaps_seconds),
        save_seconds=_median(log.save_seconds),
        tail_seconds=_median(tails),
    )
    gap = max(status.gaps_seconds, default=math.inf)
    return measured, [
        at_most("link gap, longest", gap, "s", GAP_BAR_SECONDS, peer),
        at_most("steps lost at planned ends", float(lost), "steps", 0.0, peer),
        at_most("steps done twice or never", float(wrong), "steps", 0.0, peer),
    ]


def _entries(files: object, kind: str) -> list[dict[str, object]]:
    from outlast.cluster.chain_files import entries, of_kind

    return of_kind(entries(files), kind)  # type: ignore[arg-type]


def lead_bars() -> list[Bar]:
    """A thousand ends: what a lead from some earlier saves misses and wastes.

    The optimum knows the true distribution and maximises (W - x) F(x) with W a link's length; its
    idle tail is the mean time between the end of the save and the end of the link.
    """
    found = []
    for name, spreads, counts in (
        ("spread 0.2 to 0.6, 10 to 50 saves seen", (0.2, 0.6), (10, 50)),
        ("spread 0.6 to 1, 10 to 50 saves seen", (0.6, 1.0), (10, 50)),
        ("spread 0.05 to 0.2, 10 to 50 saves seen", (0.05, 0.2), (10, 50)),
        ("spread 0.2 to 0.6, 3 to 9 saves seen", (0.2, 0.6), (3, 9)),
    ):
        missed, tail, best_missed = _ends(spreads, counts, random.Random(20261))
        peer = f"{ENDS} log-normal ends, median 5 to 120 s; the optimum misses {best_missed:.2%}"
        found += [
            at_most(f"missed saves, {name}", missed, "share", MISSED_BAR, peer),
            at_most(f"idle tail over the optimum's, {name}", tail, "ratio", TAIL_BAR, peer),
        ]
    return [replace(each, kind="simulated") for each in found]


def _ends(
    spreads: tuple[float, float], counts: tuple[int, int], drawn: random.Random
) -> tuple[float, float, float]:
    from outlast.cluster.stopping import best_lead_seconds, save_times

    missed = best_missed = 0
    idle = best_idle = 0.0
    for _ in range(ENDS):
        centre, spread = math.log(drawn.uniform(5.0, 120.0)), drawn.uniform(*spreads)
        seen = [drawn.lognormvariate(centre, spread) for _ in range(drawn.randint(*counts))]
        lead = best_lead_seconds(save_times(seen), LINK_SECONDS)
        best = _optimum(centre, spread)
        save = drawn.lognormvariate(centre, spread)
        missed += save > lead
        best_missed += save > best
        idle += max(lead - save, 0.0)
        best_idle += max(best - save, 0.0)
    return missed / ENDS, idle / best_idle, best_missed / ENDS


def _optimum(centre: float, spread: float) -> float:
    """The lead that maximises (W - x) F(x) for a known log-normal F, by a fine search."""
    from scipy.special import ndtr

    def worth(score: float) -> float:
        return float((LINK_SECONDS - math.exp(centre + spread * score)) * ndtr(score))

    return math.exp(centre + spread * max((each / 500 for each in range(5000)), key=worth))


def waste_bars(costs: Measured | None) -> Iterator[Bar]:
    """What links of eight hours spend on starts, leads and gaps, of all their time.

    Simulated: a chain of links with the measured costs of this machine's run, and with those that
    are assumed of a large one.
    """
    cases = {"assumed of a large job (start 120 s, save 30 s)": Measured(120.0, 3.0, 30.0, 5.0)}
    if costs is not None:
        cases = {"measured costs": costs, **cases}
    for name, case in cases.items():
        share = _waste(case, random.Random(3))
        words = (
            f"start {case.start_seconds:.3g} s, save {case.save_seconds:.3g} s, gap "
            f"{case.gap_seconds:.3g} s, end {case.tail_seconds:.3g} s"
        )
        yield replace(
            at_most(f"waste of 8 h links, {name}", share, "share", WASTE_BAR, words),
            kind="simulated",
        )


def _waste(case: Measured, drawn: random.Random, links: int = 200) -> float:
    """Share of wall time without training: start, lead (the last save in it), end and gap."""
    from outlast.cluster.stopping import END_SECONDS, best_lead_seconds, save_times

    centre = math.log(max(case.save_seconds, 1e-3))
    seen = [drawn.lognormvariate(centre, 0.3) for _ in range(20)]
    wasted = total = 0.0
    for _ in range(links):
        lead = best_lead_seconds(save_times(seen), LINK_SECONDS) + END_SECONDS
        save = drawn.lognormvariate(centre, 0.3)
        seen.append(save)
        # The link ends when its save and its processes have ended, and frees its nodes.
        used = LINK_SECONDS - lead + min(save + case.tail_seconds, lead)
        wasted += case.start_seconds + min(save + case.tail_seconds, lead) + case.gap_seconds
        total += used + case.gap_seconds
    return wasted / total


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def main() -> None:
    options = arguments(str(__doc__).splitlines()[0])
    publish("cluster-chain", bars(options.quick), options.json)


if __name__ == "__main__":
    main()
