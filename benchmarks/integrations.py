"""Outlast inside other frameworks: what the adapter costs a step, and what a save costs.

    python benchmarks/integrations.py [--quick] [--only FRAMEWORK ...] [--json FILE]

Each framework trains one model in turns with its own saving and with Outlast's, each time in a
process of its own (`integrations_programs.py`). With `--only`, the rows of those frameworks
take the place of the same rows of FILE.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from harness import Bar, at_most, median, publish
from integrations_programs import PROGRAMS

PROGRAM = Path(__file__).with_name("integrations_programs.py")
WARM_UP_STEPS = 5
OVERHEAD_BAR = 0.01
BLOCKED_BAR, BYTES_BAR = 0.55, 1.1
"""The store's own bars against its peers, half the time and no more bytes, and a tenth."""

STAGED_BAR = 1.1
"""Where the framework itself copies the state, as `dcp.async_save` does: the same, and a tenth."""

STAGED, SYNCED = {"dcp"}, {"dcp", "dcp_waiting"}
"""Frameworks that copy the state, and those whose own saving waits for the disk."""


@dataclass
class Side:
    """What several runs of one side have taken.

    Attributes:
        step: CPU seconds of a step, one median a run.
        blocked: Seconds by which a step was longer for a save.
        bytes: Of one save.
    """

    step: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def add(self, found: dict[str, list[float]]) -> None:
        # Step n is that between the beginnings of passes n and n + 1; a save after it is in it.
        plain = set(range(WARM_UP_STEPS, len(found["steps"]))) - {
            int(each) - 1 for each in found["saves"]
        }
        self.step.append(median([found["steps"][each] for each in plain]))
        usual = median([found["walls"][each] for each in plain])
        self.blocked += [
            max(found["walls"][int(each) - 1] - usual, 0.0)
            for each in found["saves"]
            if int(each) - 1 < len(found["walls"])
        ]
        self.bytes.append(float(found["bytes"]) / max(len(found["saves"]), 1))


def bars(framework: str, quick: bool) -> list[Bar]:
    """The rows of one framework."""
    repeats, steps, saves, width = (1, 30, 2, 128) if quick else (7, 240, 5, 768)
    sides = {"plain": Side(), "outlast": Side()}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            # Whoever is first finds the caches cold: take turns.
            for name in list(sides)[:: 1 if repeat % 2 else -1]:
                command = [sys.executable, str(PROGRAM), framework, name, f"{folder}/{name}"]
                done = subprocess.run(
                    [*command, str(steps), str(saves), str(width)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode != 0:
                    lines = done.stderr.strip().splitlines() or ["it said nothing"]
                    return [_cannot_run(framework, name, lines[-1])]
                sides[name].add(json.loads(done.stdout.splitlines()[-1]))
    plain, ours = sides["plain"], sides["outlast"]
    own, synced = "its own saving", "with" if framework in SYNCED else "without"
    seconds = median(plain.step)
    return [
        at_most(
            f"{framework}: overhead of a step",
            median(ours.step) / seconds - 1.0,
            "of CPU time",
            OVERHEAD_BAR,
            f"the same without Outlast, {1e3 * seconds:.1f} ms of CPU time",
        ),
        at_most(
            f"{framework}: blocked by a save",
            median(ours.blocked) / max(median(plain.blocked), 1e-9),
            "of its own",
            STAGED_BAR if framework in STAGED else BLOCKED_BAR,
            f"{own}: {median(plain.blocked):.4f} s, {synced} fsync",
        ),
        at_most(
            f"{framework}: bytes of a save",
            median(ours.bytes) / median(plain.bytes),
            "of its own",
            BYTES_BAR,
            f"{own}: {median(plain.bytes) / 1e6:.2f} MB",
        ),
    ]


def _cannot_run(framework: str, side: str, why: str) -> Bar:
    return Bar(
        f"{framework}: cannot run here", None, "", "runs", False, f"{side} side: {why[:200]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short run of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument(
        "--only", nargs="*", choices=[*PROGRAMS], default=[*PROGRAMS], help="these frameworks"
    )
    options = parser.parse_args()
    found: list[Bar] = []
    for framework in options.only:
        found += bars(framework, options.quick)
    publish("integrations", found, options.json, part=set(options.only) != set(PROGRAMS))


if __name__ == "__main__":
    main()
