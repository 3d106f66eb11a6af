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
        plain, killed = (Path(place) / each / "out.pt" for each in ("plain", "killed"))
        plain.parent.mkdir()
        killed.parent.mkdir()
        if (ended := run_plainly(name, plain)).code:
            return [f"{name}: the plain run ended with {ended.code}"]
        folder = Path(place) / "saves"
        died = 0
        # Twenty lives of a program of a few dozen steps are short ones; some reach its end.
        for _ in range(deaths):
            if killed.exists():
                killed.unlink()
                folder = Path(place) / f"saves-{died}"
            ended = run_outlast(name, killed, folder, dies_at=chance.randrange(1, 9))
            died += ended.code == -signal.SIGKILL
            if ended.code not in (0, -signal.SIGKILL):
                return [f"{name}: a life ended with {ended.code}"]
        if not killed.exists() and (ended := run_outlast(name, killed, folder)).code:
            return [f"{name}: the last life ended with {ended.code}"]
        return [f"{name}: {line}" for line in differences(result(plain), result(killed))[:1]]
