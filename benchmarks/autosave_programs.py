"""Ordinary programs, killed at steps drawn by chance: do they end with the same bits?"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
from pathlib import Path

from harness import Bar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "autosave"))

from killed import differences, names, result, run_outlast, run_plainly
from running import Ended

DEATHS = 20
QUICK = ("while_steps", "gan", "two_phases")


def bars(quick: bool) -> list[Bar]:
    """The rows of this part."""
    chosen = list(QUICK) if quick else names()
    deaths = 2 if quick else DEATHS
    wrong = [line for name in chosen for line in _wrong(name, deaths)]
    same = len(chosen) - len({line.partition(":")[0] for line in wrong})
    return [
        Bar(
            f"programs killed {deaths} times each that end with the plain run's bits",
            same,
            f"of {len(chosen)}",
            "all, at least 14",
            not wrong and (quick or same >= 14),
            "; ".join(wrong) or "python PROGRAM, uninterrupted",
        )
    ]


def _wrong(name: str, deaths: int) -> list[str]:
    """What went wrong with a program; empty when all was well."""
    chance = random.Random(name)
    with tempfile.TemporaryDirectory() as place:
        plain = _fresh(place, "plain")
        if (ended := run_plainly(name, plain)).code:
            return [f"{name}: the plain run ended with {ended.code}"]
        out, died, most = _fresh(place, "0"), 0, 10 * deaths
        # These programs are short: many lives reach the end of one, and another begins.
        for life in range(1, most):
            at = chance.randrange(1, 9) if died < deaths else 0
            ended = run_outlast(name, out, out.parent / "saves", dies_at=at)
            if ended.code == -signal.SIGKILL:
                died += 1
                continue
            if ended.code:
                return [f"{name}: life {life} ended with {ended.code}: {_last_line(ended)}"]
            if found := differences(result(plain), result(out))[:1]:
                return [f"{name}: life {life}: {found[0]}"]
            if died >= deaths:
                return []
            out = _fresh(place, str(life))
        return [f"{name}: killed only {died} times in {most} lives"]


def _fresh(place: str, name: str) -> Path:
    """A result's file in a folder of its own."""
    out = Path(place) / name / "out.pt"
    out.parent.mkdir()
    return out


def _last_line(ended: Ended) -> str:
    return (ended.said.strip().splitlines() or ["it said nothing"])[-1]
