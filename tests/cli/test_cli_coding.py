"""``outlast coding``: what to take, what a code guarantees, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.coding import CODES
from outlast.cli.main import main
from outlast.coding import CyclicMDS, FractionalRepetition, GraphCode


@pytest.fixture
def coding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`coding(*arguments)` gives exit code, stdout and stderr of ``outlast coding``."""

    def run(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", "coding", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return ended.value.code or 0, said.out, said.err

    return run


def chosen(out: str) -> str:
    """The scheme that the table marks."""
    [line] = [line for line in out.splitlines() if line.endswith("<- chosen")]
    return line.split()[0]


def figures(out: str) -> dict[str, str]:
    """The properties of a code by name."""
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def guarantee(out: str) -> dict[int, tuple[str, str]]:
    """Worst and mean error by number of stragglers."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    return {int(row[0]): (row[1], row[2]) for row in rows if row[0].isdigit()}


SLOW = ("--workers", 32, "--slow-share", 0.05, "--slow-factor", 10)


def test_choose_compares_all_schemes_and_takes_coverage_against_short_slowness(
    coding: Any,
) -> None:
    code, out, _ = coding("choose", *SLOW)
    assert code == 0
    for scheme in ("coverage", "repetition", "wait-all", "rebalance", "drop-slowest"):
        assert re.search(rf"^{scheme} ", out, re.MULTILINE)
    assert chosen(out) == "coverage"
    assert "Code with coverage" in out
    assert "simulated" in out


def test_choose_advises_against_a_code_where_nobody_is_slow(coding: Any) -> None:
    code, out, _ = coding("choose", "--workers", 16, "--slow-share", 0, "--slow-factor", 10)
    assert code == 0
    assert chosen(out) == "wait-all"
    assert "Do not code: waiting for the slowest" in out


def test_choose_advises_to_rebalance_where_the_same_worker_is_always_slow(coding: Any) -> None:
    lasting = ("--workers", 8, "--slow-share", 0.25, "--slow-factor", 2, "--persistence", 1)
    code, out, _ = coding("choose", *lasting, "--chunks", 16)
    assert code == 0
    assert chosen(out) == "rebalance"


def test_choose_drops_samples_only_where_that_is_allowed(coding: Any) -> None:
    _, exact, _ = coding("choose", *SLOW)
    assert "not exact" in exact
    _, out, _ = coding("choose", *SLOW, "--approximate")
    assert "not exact" not in out
    assert chosen(out) in {"deadline", "drop-slowest"}


def test_choose_scales_with_the_time_of_a_micro_batch(coding: Any) -> None:
    bounds = []
    for seconds in (1, 3):
        _, out, _ = coding("choose", *SLOW, "--chunk-seconds", seconds)
        [bound] = re.findall(r"faster than ([\d.]+) s", out)
        bounds.append(float(bound))
    assert bounds[1] == pytest.approx(3 * bounds[0], rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--workers", 8, "--slow-share", 2, "--slow-factor", 3), "share = 2.0 is not in [0, 1]"),
        (("--workers", 8, "--slow-share", 0.1, "--slow-factor", 0.5), "factor = 0.5 is below 1"),
        (
            (*SLOW, "--chunk-seconds", 0),
            "chunk_seconds = 0.0 is not above 0",
        ),
        (
            ("--workers", 8, "--slow-share", 0.9, "--slow-factor", 3, "--persistence", 0.1),
            "persistence = 0.1 is too small for slow_share = 0.9",
        ),
    ],
)
def test_choose_refuses_what_cannot_be_in_one_sentence(
    arguments: tuple[object, ...], sentence: str, coding: Any
) -> None:
    code, out, err = coding("choose", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("outlast: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_show_says_what_fractional_repetition_costs_and_guarantees(coding: Any) -> None:
    code, out, _ = coding("show", "FractionalRepetition", "--workers", 12, "--stragglers", 2)
    assert code == 0
    found = figures(out)
    assert found["chunks per worker"] == "3"
    assert found["load"] == "3 times that without a code"
    assert found["exact"] == "with any 2 stragglers"
    assert found["coefficients"] == "0 and 1"
    made = FractionalRepetition(workers=12, stragglers=2)
    for stragglers, (worst, mean) in guarantee(out).items():
        assert float(worst) == made.worst_error(stragglers).value
        expected = made.expected_error(stragglers)
        assert expected is not None
        assert float(mean) == pytest.approx(expected.value, rel=1e-3)
    assert list(guarantee(out)) == [2, 3, 4, 5]
    assert "Charles, Papailiopoulos and Ellenberg" in out


def test_show_tells_bounds_from_values(coding: Any) -> None:
    _, out, _ = coding("show", "GraphCode", "--workers", 24, "--degree", 3)
    made = GraphCode.random_regular(workers=24, degree=3)
    worst, mean = guarantee(out)[4]
    assert worst == f"<= {made.worst_error(4).value:.4g}"
    assert mean.startswith(">= ")
    _, out, _ = coding("show", "CyclicMDS", "--workers", 12, "--stragglers", 3)
    assert guarantee(out)[3] == ("0", "0")
    assert guarantee(out)[4][1] == "unknown"


def test_show_names_the_conditioning_in_the_type_of_the_messages(coding: Any) -> None:
    mds = ("show", "CyclicMDS", "--workers", 9, "--stragglers", 2)
    found = figures(coding(*mds)[1])
    assert found["coefficients"] == "real"
    assert found["condition number"].endswith("at worst, over all 36 sets of 2 stragglers")
    assert "float32" in found["rounding error"]
    double = figures(coding(*mds, "--dtype", "float64")[1])
    ratio = float(found["rounding error"].split()[0]) / float(double["rounding error"].split()[0])
    assert ratio == pytest.approx(2.0**29, rel=0.1)


@pytest.mark.parametrize("name", ["graph", "graph_code", "GRAPHCODE", "GraphCode"])
def test_show_takes_names_as_people_write_them(name: str, coding: Any) -> None:
    code, out, _ = coding("show", name, "--workers", 12, "--degree", 3)
    assert code == 0
    assert out.startswith("graph code: 12 workers, 8 chunks")


SETTINGS = {
    "FractionalRepetition": ("--stragglers", 1),
    "CyclicRepetition": ("--stragglers", 2),
    "CyclicMDS": ("--stragglers", 3),
    "ReedSolomon": ("--stragglers", 2),
    "RealReedSolomon": ("--stragglers", 2),
    "GraphCode": ("--degree", 3),
    "Expander": ("--degree", 4),
    "SymmetricDesign": (),
    "SoftDesign": ("--copies", 3),
    "BernoulliCode": ("--mean-copies", 4, "--seed", 3),
}


@pytest.mark.parametrize("name", CODES)
def test_show_knows_every_code_that_it_names(name: str, coding: Any) -> None:
    workers = 13 if name == "SymmetricDesign" else 12
    code, out, err = coding("show", name, "--workers", workers, *SETTINGS[name])
    assert (code, err) == (0, "")
    assert f": {workers} workers" in out
    assert guarantee(out)


def test_a_random_code_without_guarantee_says_so(coding: Any) -> None:
    _, out, _ = coding("show", "BernoulliCode", "--workers", 20, "--mean-copies", 3)
    assert figures(out)["exact"] == "never for sure: a chunk may be held by nobody"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("Hamming", "--workers", 4), "code = Hamming is not known; take one of Fractional"),
        (
            ("FractionalRepetition", "--workers", 10, "--stragglers", 2),
            "is not a multiple of stragglers + 1 = 3; take stragglers = 1 or 4, or workers = 9",
        ),
        (("Expander", "--workers", 12), "Expander needs --degree; Expander takes --workers"),
        (
            ("CyclicMDS", "--workers", 12, "--degree", 3, "--stragglers", 3),
            "CyclicMDS has no --degree; CyclicMDS takes --workers, --dtype, --stragglers",
        ),
        (
            ("CyclicMDS", "--workers", 12, "--stragglers", 2),
            "take stragglers = 3, or workers = 11 or 13",
        ),
    ],
)
def test_show_refuses_in_one_sentence_with_what_would_be_right(
    arguments: tuple[object, ...], sentence: str, coding: Any
) -> None:
    code, out, err = coding("show", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_codes_that_rounding_would_spoil_are_refused(coding: Any) -> None:
    bad = ("show", "CyclicMDS", "--workers", 24, "--stragglers", 5, "--dtype", "bfloat16")
    code, _, err = coding(*bad)
    assert code == 2
    assert "in bfloat16" in err
    with pytest.raises(Exception, match="bfloat16"):
        CyclicMDS(workers=24, stragglers=5, dtype="bfloat16")


@pytest.mark.slow
def test_the_commands_have_help_and_need_no_torch() -> None:
    script = (
        "import runpy, sys\n"
        "sys.argv = ['outlast', 'coding', 'show', 'graph', '--workers', '12', '--degree', '3']\n"
        "try:\n    runpy.run_module('outlast', run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path("/")
    )
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert "outlast.cli.coding" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("command", [(), ("choose",), ("show",)])
def test_every_command_has_help(command: tuple[str, ...], coding: Any) -> None:
    code, out, _ = coding(*command, "--help")
    assert code == 0
    assert " ".join(("Usage: outlast coding", *command)) in out
