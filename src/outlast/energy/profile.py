"""Time and energy of operations at each clock: what a profiler measures and the planner needs.

*Smoothing.* A planner picks the points whose errors flatter it (the winner's curse), so plans from
a noisy profile miss their deadline on the device. Each curve is smoothed first: power and time are
smooth functions of the clock, so log time and log energy get the curve z that minimises

    sum (y_i - z_i)^2 + lambda * sum (second differences of z)^2

(Whittaker 1923), lambda from generalised cross-validation (Golub, Heath and Wahba 1979). Curves
of the same phase at the same clocks, such as those of equal stages, lend each other strength: their
mean is smoothed, and so is what each differs from it, which mostly is a straight line.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from outlast.energy.plan import VERSION, publish, publish_text, read
from outlast.energy.window import KINDS
from outlast.errors import EnergyError
from outlast.paths import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from outlast.energy.window import Kind


class Point(NamedTuple):
    """One operation at one clock.

    Attributes:
        clock_mhz: SM clock; 0 for an operation whose time no clock changes (a transfer).
        seconds: Duration.
        joules: Energy of one device while the operation runs, idle power included.
    """

    clock_mhz: int
    seconds: float
    joules: float


class Key(NamedTuple):
    """Label of operations of equal time and energy: (virtual) stage and phase."""

    stage: int
    phase: str


@dataclass(frozen=True)
class Curve:
    """An operation at all measured clocks.

    Attributes:
        points: By ascending clock; no clock twice.
    """

    points: tuple[Point, ...]

    @property
    def top(self) -> Point:
        """At the highest clock, which need not be the fastest point of a noisy profile."""
        return self.points[-1]

    def at(self, clock_mhz: int) -> Point:
        """The point of a clock.

        Raises:
            EnergyError: When it was not measured.
        """
        for point in self.points:
            if point.clock_mhz == clock_mhz:
                return point
        known = ", ".join(str(point.clock_mhz) for point in self.points)
        raise EnergyError(f"clock = {clock_mhz} MHz is not in the profile, which has {known}")

    def pareto(self, blocking_watts: float) -> tuple[Point, ...]:
        """The points that are worth running at, fastest first.

        Slower ones take less *effective* energy, joules - blocking_watts * seconds: a device that
        finishes early continues to draw its blocking power (Perseus, SOSP'24, section 4.1).
        """
        best: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.seconds, p.joules)):
            if not best or effective(point, blocking_watts) < effective(best[-1], blocking_watts):
                best.append(point)
        return tuple(best)


@dataclass(frozen=True)
class Profile:
    """Curves of all operations of a training step on one kind of device.

    Attributes:
        curves: By stage and phase.
        blocking_watts: Power of a device that waits for another one.
        device: Name of the device, in words.
        kind: How the curves were found.
        flags: What a reader of plans made from it must know, one sentence each.
    """

    curves: Mapping[Key, Curve]
    blocking_watts: float
    device: str = "unknown device"
    kind: Kind = "measured"
    flags: tuple[str, ...] = ()

    def curve(self, key: Key) -> Curve:
        """The curve of an operation.

        Raises:
            EnergyError: When the profile has none, with those that it has.
        """
        if key not in self.curves:
            known = ", ".join(f"stage {k.stage} {k.phase}" for k in sorted(self.curves))
            raise EnergyError(
                f"the profile has no stage {key.stage} {key.phase}; it has {known}: measure it too"
            )
        return self.curves[key]


def effective(point: Point, blocking_watts: float) -> float:
    """Joules above those that the device would draw waiting for the same time.

    Not for operations on links, which keep no device from drawing them: see `curves_of`.
    """
    return point.joules - blocking_watts * point.seconds


LOWEST_WATTS, HIGHEST_WATTS = 5.0, 3000.0
"""Between an embedded module that idles and more than any accelerator draws."""


LEAST_BLOCKING_WATTS = 5.0
"""Below this, but not 0, a blocking power is probably in kW."""


THOUSAND = (500.0, 2000.0)
"""Times of one phase in two stages that differ by such a factor are in different units."""


TOP_SLOWER, NOISY_TOP_SLOWER = 0.01, 0.05
"""By how much the top clock may be slower than the fastest one; where noise explains it."""


JUMP = 0.25
"""By how much energy may leave a curve that first falls and then rises with the clock."""


_LOWEST_MHZ, _HIGHEST_MHZ = 50, 10_000


def check_profile(profile: Profile, where: str = "the profile") -> None:
    """Refuse a profile that would give wrong plans.

    Args:
        profile: What to check.
        where: What to call it in the sentence.

    Raises:
        EnergyError: Names the first thing that is wrong, its value and what would be right.
    """
    if not profile.curves:
        raise EnergyError(f"{where} has no curves: measure at least one operation")
    watts = profile.blocking_watts
    if not math.isfinite(watts) or watts < 0:
        raise EnergyError(
            f"{where}: blocking_watts = {watts:g} must be the power of a waiting device in W, "
            "e.g. 84"
        )
    for key, curve in sorted(profile.curves.items()):
        _check_curve(key, curve, where)
    _check_times(profile, where)
    _check_blocking(profile, where)
    _check_clocks(profile, where)
    for key, curve in sorted(profile.curves.items()):
        _check_shape(key, curve, where)


def _check_curve(key: Key, curve: Curve, where: str) -> None:
    name = f"{where}: stage {key.stage} {key.phase}"
    if not curve.points:
        raise EnergyError(f"{name} has no points: measure it at one clock or more")
    clocks = [point.clock_mhz for point in curve.points]
    for clock in clocks:
        if clocks.count(clock) > 1:
            raise EnergyError(f"{name} has {clock} MHz twice: keep one measurement of each clock")
        if clock and not _LOWEST_MHZ <= clock <= _HIGHEST_MHZ:
            raise EnergyError(
                f"{name} has a clock of {clock} MHz, which no device runs at: give clocks in MHz, "
                "e.g. 1410"
            )
    if clocks != sorted(clocks):
        raise EnergyError(f"{name} is not sorted by clock: give its points by rising clock")
    if 0 in clocks and len(clocks) > 1:
        raise EnergyError(
            f"{name} has clock 0, which is for operations that no clock changes, among others: "
            "give it one point only, or real clocks"
        )
    for point in curve.points:
        # What no clock changes may also take no energy of its own: a transfer on a link.
        positive = point.joules > 0 or (not point.clock_mhz and point.joules == 0)
        for unit, value, fine in (
            ("seconds", point.seconds, point.seconds > 0),
            ("joules", point.joules, positive),
        ):
            if not fine or not math.isfinite(value):
                raise EnergyError(
                    f"{name} at {point.clock_mhz} MHz has {unit} = {value:g}, which must be above "
                    "0: measure it again"
                )
    watts = [point.joules / point.seconds for point in curve.points if point.clock_mhz]
    typical = statistics.median(watts) if watts else LOWEST_WATTS
    if LOWEST_WATTS <= typical <= HIGHEST_WATTS:
        return
    guess = (
        "are the times in ms (divide them by 1000), or is the energy in kJ?"
        if typical < LOWEST_WATTS
        else "is the energy in mJ (divide it by 1000), or are the times in ks or hours?"
    )
    raise EnergyError(
        f"{name} has a power of {typical:.3g} W (joules / seconds), which no accelerator draws "
        f"while it computes: {guess}"
    )


def _check_times(profile: Profile, where: str) -> None:
    """Refuse a stage in ms among others in s: also where its joules are in mJ, so that W look fine.

    A stage may be much lighter than others (an embedding alone), but rarely by such a factor.
    """
    fastest: dict[str, dict[Key, float]] = {}
    for key, curve in sorted(profile.curves.items()):
        if curve.top.clock_mhz:
            fastest.setdefault(key.phase, {})[key] = min(p.seconds for p in curve.points)
    for times in fastest.values():
        usual = statistics.median_low(times.values())
        other = next(key for key, seconds in times.items() if seconds == usual)
        for key, seconds in times.items():
            ratio = max(seconds, usual) / min(seconds, usual)
            if THOUSAND[0] <= ratio <= THOUSAND[1]:
                raise EnergyError(
                    f"{where}: stage {key.stage} {key.phase} takes {seconds:.4g} s but stage "
                    f"{other.stage} {other.phase} {usual:.4g} s, about a thousand times as much or "
                    "as little: is one of them in ms? Give both in s, and energy in J"
                )


def _check_blocking(profile: Profile, where: str) -> None:
    watts = profile.blocking_watts
    name = f"{where}: blocking_watts = {watts:g}"
    if watts > HIGHEST_WATTS:
        raise EnergyError(f"{name} looks like mW: give it in W")
    if 0 < watts < LEAST_BLOCKING_WATTS:
        raise EnergyError(
            f"{name} is less than any waiting accelerator draws: is it in kW? Give it in W, or 0 "
            "to leave waiting out"
        )
    working = [
        (point.joules / point.seconds, key, point.clock_mhz)
        for key, curve in profile.curves.items()
        for point in curve.points
        if point.clock_mhz
    ]
    if not working:
        return
    lowest, key, clock = min(working)
    if watts > lowest:
        raise EnergyError(
            f"{name} is above the {lowest:.4g} W of stage {key.stage} {key.phase} at {clock} MHz: "
            "a device that waits draws less than one that works, so measure its power while it "
            "waits"
        )


def _check_clocks(profile: Profile, where: str) -> None:
    """Curves of one kind of device must have the same clocks.

    Those of one stage are, and those with the same lowest and highest clock and the same step.
    """
    clocks = {
        key: {point.clock_mhz for point in curve.points}
        for key, curve in sorted(profile.curves.items())
        if curve.points[0].clock_mhz
    }
    for key, own in clocks.items():
        for other, wanted in clocks.items():
            alike = key.stage == other.stage or _range(own) == _range(wanted)
            if alike and wanted - own:
                missing = sorted(wanted - own)
                shown = ", ".join(map(str, missing[:4])) + (", ..." if missing[4:] else "")
                raise EnergyError(
                    f"{where}: stage {key.stage} {key.phase} lacks {shown} MHz, which stage "
                    f"{other.stage} {other.phase} has: measure both at the same clocks, or leave "
                    "these clocks out"
                )


def _range(clocks: set[int]) -> tuple[int, int, int]:
    """Lowest, highest and step of clocks, in MHz."""
    steps = [after - before for before, after in itertools.pairwise(sorted(clocks))]
    return min(clocks), max(clocks), min(steps, default=0)


def _check_shape(key: Key, curve: Curve, where: str) -> None:
    name = f"{where}: stage {key.stage} {key.phase}"
    fastest = min(curve.points, key=lambda point: point.seconds)
    slower = curve.top.seconds / fastest.seconds - 1
    if slower > min(max(TOP_SLOWER, 3 * _time_noise(curve)), NOISY_TOP_SLOWER):
        raise EnergyError(
            f"{name} is {slower:.1%} slower at its top clock of {curve.top.clock_mhz} MHz "
            f"({curve.top.seconds:.4g} s) than at {fastest.clock_mhz} MHz "
            f"({fastest.seconds:.4g} s): throttled? Measure again, or leave that clock out"
        )
    joules = [point.joules for point in curve.points]
    for place, point in enumerate(curve.points):
        low_left = min(joules[:place], default=point.joules)
        low_right = min(joules[place + 1 :], default=point.joules)
        # Energy falls with the clock, then rises: no point may stand out above both sides.
        if point.joules > max(low_left, low_right) * (1 + JUMP):
            raise EnergyError(
                f"{name} takes {point.joules:.4g} J at {point.clock_mhz} MHz but "
                f"{low_left:.4g} J at a lower clock and {low_right:.4g} J at a higher one: energy "
                "falls and then rises with the clock, so measure this clock again"
            )


def _time_noise(curve: Curve) -> float:
    """Relative standard deviation of times from those of neighbours; 0 for fewer than 5 points.

    Between neighbours time is taken as a + b / f; the median leaves out single bad points.
    """
    if len(curve.points) < 5:
        return 0.0
    errors = []
    for before, here, after in zip(curve.points, curve.points[1:], curve.points[2:], strict=False):
        whole = 1 / after.clock_mhz - 1 / before.clock_mhz
        share = (1 / here.clock_mhz - 1 / before.clock_mhz) / whole
        expected = before.seconds + share * (after.seconds - before.seconds)
        errors.append(abs(here.seconds / expected - 1))
    # 1.4826: from the median of magnitudes to the deviation of a normal distribution; 1.5: variance
    # of a point plus that of the mean of two.
    return 1.4826 * statistics.median(errors) / math.sqrt(1.5)


_FORMAT = "outlast energy profile"


_ALIASES = {
    "stage": "stage",
    "phase": "phase",
    "instruction": "phase",
    "clock_mhz": "clock_mhz",
    "frequency": "clock_mhz",
    "seconds": "seconds",
    "time": "seconds",
    "joules": "joules",
    "energy": "joules",
}


_COLUMNS = ("stage", "phase", "clock_mhz", "seconds", "joules")


_FACTS = ("blocking_watts", "device", "kind")


def read_profile(
    path: Path | str, *, blocking_watts: float | None = None, device: str | None = None
) -> Profile:
    """A profile from a CSV or JSON file, checked by `check_profile`.

    Args:
        path: Ends with .csv or .json.
        blocking_watts: Power of a waiting device; wins over the file's.
        device: Name of the device; wins over the file's.

    Raises:
        EnergyError: When the file cannot be read or anything in it is wrong.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        content = read(path, _FORMAT)
        facts = {name: content[name] for name in (*_FACTS, "flags") if name in content}
        rows = _json_rows(content, path)
    elif path.suffix.lower() == ".csv":
        facts, rows = _csv_rows(path)
    else:
        raise EnergyError(f"{path} ends with neither .csv nor .json: name a profile of that kind")
    if blocking_watts is not None:
        facts["blocking_watts"] = blocking_watts
    if "blocking_watts" not in facts:
        raise EnergyError(
            f"{path} does not say blocking_watts, the power of a device that waits for another: "
            "pass it, or begin the file with a line such as # blocking_watts = 83.64"
        )
    kind = facts.get("kind", "measured")
    if kind not in KINDS:
        raise EnergyError(f'{path}: kind = "{kind}" is not one of {", ".join(KINDS)}')
    flags = facts.get("flags", [])
    if not isinstance(flags, list) or not all(isinstance(item, str) for item in flags):
        raise EnergyError(f"{path}: flags = {_shown(flags)} is no list of sentences: correct it")
    profile = Profile(
        _curves(rows, path),
        _number(facts["blocking_watts"], "blocking_watts", str(path)),
        device=device or str(facts.get("device", "unknown device")),
        kind=cast("Kind", kind),
        flags=tuple(flags),
    )
    check_profile(profile, str(path))
    return profile


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile; a reader sees all of the file or none.

    Args:
        profile: Any one that `check_profile` accepts.
        path: Ends with .csv or .json.

    Raises:
        EnergyError: When the profile is wrong or the place cannot be written.
    """
    path = Path(path)
    check_profile(profile, "the profile")
    rows = [
        dict(zip(_COLUMNS, (*key, *point), strict=True))
        for key, curve in sorted(profile.curves.items())
        for point in curve.points
    ]
    facts = {name: getattr(profile, name) for name in _FACTS}
    if path.suffix.lower() == ".json":
        flags = {"flags": list(profile.flags)} if profile.flags else {}
        publish(path, {"format": _FORMAT, "version": VERSION, **facts, **flags, "points": rows})
    elif path.suffix.lower() == ".csv":
        text = io.StringIO()
        lines = [*facts.items(), *(("flag", flag) for flag in profile.flags)]
        text.writelines(f"# {name} = {' '.join(str(fact).split())}\n" for name, fact in lines)
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        publish_text(path, text.getvalue())
    else:
        raise EnergyError(f"{path} ends with neither .csv nor .json: choose one of them")


def _json_rows(content: Mapping[str, Any], path: Path) -> list[tuple[str, dict[str, Any]]]:
    allowed = {"format", "version", "points", "flags", *_FACTS}
    for name in content.keys() - allowed:
        raise EnergyError(f'{path} has an unknown field "{name}"{_hint(name, sorted(allowed))}')
    points = content.get("points")
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise EnergyError(f'{path} has no list "points" of objects: add one for each measurement')
    found = []
    for number, point in enumerate(points, start=1):
        where = f"{path}, point {number}"
        names = _columns(list(point), where)
        found.append((where, {names[name]: value for name, value in point.items()}))
    return found


def _csv_rows(path: Path) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise EnergyError(f"{path} cannot be read ({error.strerror}): give another file") from error
    except UnicodeDecodeError as error:
        raise EnergyError(f"{path} is no UTF-8 text: save it as CSV in UTF-8") from error
    facts: dict[str, Any] = {}
    comments = 0
    while comments < len(lines) and lines[comments].startswith("#"):
        name, equals, value = lines[comments].removeprefix("#").partition("=")
        if equals and name.strip() in _FACTS:
            facts[name.strip()] = value.strip()
        elif equals and name.strip() == "flag":
            facts.setdefault("flags", []).append(value.strip())
        comments += 1
    if comments == len(lines):
        raise EnergyError(f"{path} is empty: give it the columns {', '.join(_COLUMNS)}")
    try:
        header, *rows = csv.reader(lines[comments:])
    except csv.Error as error:
        raise EnergyError(f"{path} is no CSV file ({error}): look for stray quotes") from error
    header = [name.strip() for name in header]
    names = _columns(header, str(path))
    found = []
    for number, row in enumerate(rows, start=comments + 2):
        if not row:
            continue
        where = f"{path}, line {number}"
        if len(row) != len(header):
            raise EnergyError(
                f"{where} has {len(row)} values for {len(header)} columns: complete the line"
            )
        found.append((where, {names[name]: item for name, item in zip(header, row, strict=True)}))
    return facts, found


def _columns(header: Sequence[str], where: str) -> dict[str, str]:
    """From the names in a file to ours; all five exactly once."""
    for name in header:
        if name not in _ALIASES:
            raise EnergyError(
                f'{where} has an unknown column "{name}"{_hint(name, list(_ALIASES))}'
            )
    ours = [_ALIASES[name] for name in header]
    for column in _COLUMNS:
        if ours.count(column) != 1:
            names = " or ".join(name for name, own in _ALIASES.items() if own == column)
            count = "no column" if column not in ours else "more than one column"
            raise EnergyError(f"{where} has {count} for {column}: it needs one, named {names}")
    return {name: _ALIASES[name] for name in header}


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name.lower(), known, n=1)
    return f": did you mean {near[0]}?" if near else f": known are {', '.join(known)}"


def _curves(rows: Iterable[tuple[str, Mapping[str, Any]]], path: Path) -> dict[Key, Curve]:
    found: dict[Key, dict[int, Point]] = defaultdict(dict)
    for where, row in rows:
        stage = _whole(row["stage"], "stage", where)
        phase = row["phase"]
        if not isinstance(phase, str) or not phase.strip():
            raise EnergyError(f'{where}: phase = "{phase}" is no name: say e.g. forward')
        clock = _whole(row["clock_mhz"], "clock_mhz", where)
        own = found[Key(stage, phase.strip())]
        if clock in own:
            raise EnergyError(
                f"{where} gives stage {stage} {phase} at {clock} MHz a second time: keep one "
                "measurement of each clock, e.g. the median"
            )
        own[clock] = Point(
            clock,
            _number(row["seconds"], "seconds", where),
            _number(row["joules"], "joules", where),
        )
    if not found:
        raise EnergyError(f"{path} has no measurements: add one line for each operation and clock")
    return {key: Curve(tuple(sorted(points.values()))) for key, points in found.items()}


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnergyError(f"{where}: {name} = {_shown(value)} is not a finite number: correct it")
    return number


def _whole(value: Any, name: str, where: str) -> int:
    number = _number(value, name, where)
    if number < 0 or number != int(number):
        unit = ", in MHz" if name == "clock_mhz" else ""
        raise EnergyError(f"{where}: {name} = {_shown(value)} must be a whole number from 0{unit}")
    return int(number)


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


Floats: TypeAlias = "npt.NDArray[np.float64]"
MARGIN_PER_NOISE = 0.75
"""Share of the noise to keep free of the deadline; see `margin_for`."""
_STRENGTHS = np.geomspace(1e-3, 1e6, 46)
# Fewer points than this show no noise, because any of them may be a bend.
_FEWEST = 6
# From median absolute deviation to standard deviation of a normal distribution.
_NORMAL = 1.4826


def noise_of(profile: Profile) -> float:
    """Standard deviation of the times' noise, as a share of them.

    Third differences of log time cancel what is smooth; of independent errors they have the
    variance 20 sigma^2 (Gasser, Sroka and Jennen-Steinmetz 1986). The median over all curves is
    not moved by single jumps.

    Raises:
        EnergyError: When no curve has enough points.
    """
    differences = [
        np.diff(np.log([point.seconds for point in curve.points]), 3)
        for curve in profile.curves.values()
        if len(curve.points) >= _FEWEST
    ]
    if not differences:
        raise EnergyError(
            f"the profile has no curve with {_FEWEST} clocks or more, too few to estimate its "
            "noise: measure more clocks, or state the margin"
        )
    return float(_NORMAL * np.median(np.abs(np.concatenate(differences))) / np.sqrt(20.0))


def margin_for(profile: Profile) -> float:
    """Share of the deadline to keep free so that a smoothed profile's plan meets it.

    `MARGIN_PER_NOISE` times the noise: found by repeating plans with 1 and 2 % noise on two
    measured profiles of GPT-3, of which at least 95 % then met the deadline without noise.

    Args:
        profile: As it was measured, not smoothed.

    Raises:
        EnergyError: When the noise cannot be estimated.
    """
    return MARGIN_PER_NOISE * noise_of(profile)


def smoothed(profile: Profile) -> Profile:
    """The profile with smooth curves; the measured one where it has next to no noise.

    The estimated noise keeps curves from being smoothed further than it explains.

    Args:
        profile: As it was measured.

    Raises:
        EnergyError: When the noise cannot be estimated.
    """
    sigma = noise_of(profile)
    if sigma < 1e-6:
        return profile
    alike: dict[tuple[str, tuple[int, ...]], list[Key]] = {}
    for key, curve in profile.curves.items():
        clocks = tuple(point.clock_mhz for point in curve.points)
        alike.setdefault((key.phase, clocks), []).append(key)
    curves = dict(profile.curves)
    for (_, clocks), keys in alike.items():
        if len(clocks) < _FEWEST:
            continue
        measured = np.array([profile.curves[key].points for key in keys], dtype=float)
        values = []
        for logarithms in (np.log(measured[..., 1]), np.log(measured[..., 2])):
            mean = logarithms.mean(axis=0)
            common = _whittaker(measured[0, :, 0], mean, sigma / len(keys) ** 0.5)
            own = [common + _whittaker(measured[0, :, 0], x - mean, sigma) for x in logarithms]
            values.append(np.exp(own))
        for key, seconds, joules in zip(keys, *values, strict=True):
            points = zip(clocks, seconds.tolist(), joules.tolist(), strict=True)
            curves[key] = Curve(tuple(map(Point._make, points)))
    return replace(profile, curves=curves)


def _whittaker(clocks: Floats, values: Floats, sigma: float) -> Floats:
    """The smooth curve of least generalised cross-validation whose residuals are at most noise."""
    count = len(values)
    steps = np.diff(clocks) / np.mean(np.diff(clocks))
    first = np.diff(np.eye(count), axis=0) / steps[:, None]
    second = np.diff(first, axis=0) / ((steps[1:] + steps[:-1]) / 2)[:, None]
    roughness, vectors = np.linalg.eigh(second.T @ second)
    coefficients = vectors.T @ values
    best, score = values, np.inf
    for strength in _STRENGTHS:
        kept = 1 / (1 + strength * np.clip(roughness, 0, None))
        residual = float(np.sum(((1 - kept) * coefficients) ** 2))
        freedom = count - float(kept.sum())
        # A curve that is off by more than the noise explains is too stiff.
        if residual > 2.0 * sigma**2 * freedom:
            continue
        found = count * residual / freedom**2
        if found < score:
            best, score = vectors @ (kept * coefficients), found
    return best
