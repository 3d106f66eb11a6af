"""Calibrations: constants with errors, ranges, provenance, and their TOML file.

calibration = read_calibration("h100.calibration.toml")
calibration.constants["matmul_efficiency"].value
calibration.conformal.interval(2.0, 0.03, "nanotron on h100-sxm")

Reading is strict: an unknown or missing key, a number out of its range, and a file that was changed
after it was written are refused. A digest of the content tells the last; whoever edits a file on
purpose removes that line.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.batch import Array
from outlast.plan.conformal import Conformal

__all__ = [
    "Calibration",
    "Constant",
    "Provenance",
    "ResidualPoints",
    "from_text",
    "read_calibration",
    "to_text",
    "write_calibration",
]

NUMBER = (int, float)


def check_keys(
    table: Mapping[str, Any], kinds: Mapping[str, Any], optional: Collection[str], where: str
) -> None:
    """Refuses a table with other keys or types than expected.

    Args:
        table: As TOML was read.
        kinds: Known keys and the type of each.
        optional: Those that may be missing.
        where: File and table, for the sentence.

    Raises:
        PlanError: A key is unknown ("did you mean"), missing, or has a value of another type.
    """
    for name in table:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(kinds)}"
            raise PlanError(f"{where}: {name} is not a known key; {hint}")
    for name, kind in kinds.items():
        if name not in table:
            if name in optional:
                continue
            raise PlanError(f"{where} lacks {name}: add it")
        value = table[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise PlanError(f"{where}: {name} = {str(value)[:60]!r} has the wrong type")


def texts(values: Sequence[Any], where: str) -> tuple[str, ...]:
    """A list of texts.

    Raises:
        PlanError: Something else is among them.
    """
    if not all(isinstance(value, str) for value in values):
        raise PlanError(f"{where} must be a list of texts")
    return tuple(values)


def number(value: Any, where: str) -> float:
    """A number.

    Raises:
        PlanError: It is something else.
    """
    if not isinstance(value, NUMBER) or isinstance(value, bool):
        raise PlanError(f"{where} = {str(value)[:60]!r} must be a number")
    return float(value)


_SLACK = 1.0 + 1e-9

KINDS: Mapping[str, tuple[str, ...]] = {
    "sharding": (
        "without sharding",
        "that shards the optimizer",
        "that shards gradients",
        "that shards parameters",
    ),
    "recompute": (
        "without recomputation",
        "that recomputes attention",
        "that recomputes whole blocks",
    ),
    "zero_bubble": ("of another schedule than zero_bubble", "of the zero_bubble schedule"),
    "gpipe": ("of another schedule than gpipe", "of the gpipe schedule"),
    "quantized": ("in another precision than fp8", "in fp8"),
    "half": ("in fp32", "in 16 bits"),
    "muon": ("with another optimizer than Muon", "with Muon"),
    "unfused": ("with fused attention", "with unfused attention"),
}
"""Features that tell kinds of runs, and in words a run of each kind."""


@dataclass(frozen=True, slots=True)
class Support:
    """Smallest and largest value of each feature among the calibrated rows.

    Attributes:
        ranges: By feature, e.g. "devices"; not negative, since distances are in log space.
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for name, (low, high) in self.ranges.items():
            if not 0.0 <= low <= high < float("inf"):
                raise PlanError(f"support of {name} from {low:g} to {high:g} is no range from 0 on")

    def distances(self, features: Mapping[str, Array]) -> Array:
        """Distances of runs from the ranges: sums over features of the log of the excess.

        A run with twice the most devices and all else inside is log 2 = 0.69 away.

        Args:
            features: By name, (n,) or (1,) each; a feature without a range is left out.

        Returns:
            (n,).
        """
        total = np.zeros(1)
        for name, (low, high) in self.ranges.items():
            if name in features:
                total = total + _excess(np.asarray(features[name], np.float64), low, high)
        return total

    def outside(self, features: Mapping[str, float]) -> tuple[str, ...]:
        """Name the features of one run that are outside, and by how much: a phrase each."""
        phrases = []
        for name, (low, high) in self.ranges.items():
            if name not in features:
                continue
            value = float(features[name])
            above = value > high * _SLACK
            if not above and value * _SLACK >= low:
                continue
            if name in KINDS:
                phrases.append(f"no run {KINDS[name][int(value)]} was measured")
                continue
            by = "outside"
            if above and high:
                by = f"{value / high:.3g} times above"
            elif not above and value:
                by = f"{low / value:.3g} times below"
            phrases.append(f"{name} = {value:.6g} is {by} the calibrated {_range_of(low, high)}")
        return tuple(phrases)

    def joined(self, other: Support) -> Support:
        """The smallest ranges that hold both."""
        ranges = dict(self.ranges)
        for name, (low, high) in other.ranges.items():
            own = ranges.get(name, (low, high))
            ranges[name] = min(low, own[0]), max(high, own[1])
        return Support(ranges)


@dataclass(frozen=True, slots=True)
class Place:
    """Calibrated ranges of one interval group.

    Attributes:
        ranges: Of the features of its runs.
        utilisation: Largest share of the peak (MFU) among its runs, by precision.
    """

    ranges: Support
    utilisation: Mapping[str, float]

    def __post_init__(self) -> None:
        for precision, share in self.utilisation.items():
            if not 0.0 < share < float("inf"):
                raise PlanError(
                    f"utilisation = {share:g} in {precision} of a calibrated place: calibrate again"
                )


def support_of(features: Mapping[str, Array]) -> Support:
    """The ranges of calibrated rows.

    Args:
        features: By name, (n,) each, not negative and finite.

    Raises:
        PlanError: A feature without values, or with one that is negative or not finite.
    """
    ranges = {}
    for name, values in features.items():
        array = np.asarray(values, np.float64)
        if not array.size or not np.all(np.isfinite(array)) or array.min() < 0:
            raise PlanError(f"feature {name} has no values, or some below 0: give one per row")
        ranges[name] = (float(array.min()), float(array.max()))
    return Support(ranges)


def _excess(values: Array, low: float, high: float) -> Array:
    """Log of the factor outside of the range; 1 where a range or a value of 0 has no factor."""
    above = values > high * _SLACK
    below = values * _SLACK < low
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.log(values / high) if high else np.ones_like(values)
        under = np.where(values > 0, np.log(low / values), 1.0) if low else np.zeros_like(values)
    found: Array = np.where(above, over, np.where(below, under, 0.0))
    return found


def _range_of(low: float, high: float) -> str:
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


ORIGINS = ("calibrated", "prior", "measured", "published", "datasheet")


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of the model.

    Attributes:
        value: In `unit`.
        log_deviation: Its standard deviation on the scale on which it is fitted (the logarithm, or
            log odds of its share of a bound: `constants.unbounded`); 0 where it is held fixed.
        unit: Of the value.
        origin: One of `ORIGINS`.
        group: Chip, cluster or framework that it belongs to; empty for all runs.
    """

    value: float
    log_deviation: float
    unit: str
    origin: str
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualPoints:
    """Rows near which the formulas' error is known: the support of a Gaussian process.

    Attributes:
        names: (k,) of the features.
        features: (n, k) of the rows, as the process measures distances.
        places: (n,) of the rows: only runs of the same place are corrected.
        residuals: (n,) log of measured over predicted seconds.
        noises: (n,) log standard deviations of the measurements, larger for outliers.
        amplitude: Log standard deviation of the process.
        length_scales: (k,) in units of the features.
    """

    names: tuple[str, ...]
    features: Array
    places: tuple[str, ...]
    residuals: Array
    noises: Array
    amplitude: float
    length_scales: Array

    def __post_init__(self) -> None:
        rows, columns = len(self.places), len(self.names)
        for name, shape in (
            ("features", (rows, columns)),
            ("residuals", (rows,)),
            ("noises", (rows,)),
            ("length_scales", (columns,)),
        ):
            array = np.asarray(getattr(self, name), np.float64)
            if array.shape != shape or not np.all(np.isfinite(array)):
                raise PlanError(
                    f"residual.{name} has shape {array.shape} or is not finite: it should be "
                    f"{shape}"
                )
            object.__setattr__(self, name, array)
        if not (
            np.all(self.noises >= 0) and np.all(self.length_scales > 0) and self.amplitude >= 0
        ):
            raise PlanError("residual has a noise or amplitude below 0 or a length scale of 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of a calibration.

    Attributes:
        date: As the caller says it, e.g. "2026-11-22".
        version: Of Outlast.
        rows: Names of the rows used.
        sources: Tables, logs and run directories that they come from.
        flagged: Sentences about rows that were left out.
        text: For people.
    """

    date: str
    version: str
    rows: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    flagged: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """All that a prediction needs beside the run and the cluster.

    Attributes:
        constants: By name.
        order: (p,) names of those that the fit moved, in the order of `correlation`.
        correlation: (p, p) of their errors in log space.
        residual: Correction near measured rows; None for none.
        quantiles: Of the interval scores, by group, with `groups.OTHERS` for all others.
        floor: Log standard deviation of a row that the fit knows perfectly.
        coverage: Share of truths that the intervals should hold.
        support: Calibrated range of each feature.
        provenance: Where it comes from.
        places: What was measured, by interval group; empty in files of older versions, whose
            groups do not tell clusters apart, so that none counts as calibrated.
    """

    constants: Mapping[str, Constant]
    order: tuple[str, ...]
    correlation: Array
    residual: ResidualPoints | None = None
    quantiles: Mapping[str, float]
    floor: float
    coverage: float = 0.9
    support: Mapping[str, tuple[float, float]]
    provenance: Provenance
    places: Mapping[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, constant in self.constants.items():
            if not (math.isfinite(constant.value) and 0 <= constant.log_deviation < math.inf):
                raise PlanError(f"constant {name} = {constant.value:g} is not finite: fit it again")
            if constant.origin not in ORIGINS:
                raise PlanError(
                    f"constant {name} has origin {constant.origin!r}, which is none of "
                    f"{', '.join(ORIGINS)}"
                )
        for name in self.order:
            if name not in self.constants:
                raise PlanError(f"order names {name}, which is not among the constants")
        object.__setattr__(self, "correlation", _correlation(self.correlation, len(self.order)))
        for name, value in self.quantiles.items():
            if not 0 <= value < math.inf:
                raise PlanError(
                    f"quantile of {name} = {value:g} is not 0 or above: calibrate again"
                )
        if not (0 <= self.floor < math.inf and 0 < self.coverage < 1):
            raise PlanError(
                f"floor = {self.floor:g} and coverage = {self.coverage:g}: the first should be "
                "0 or above, the second between 0 and 1"
            )
        Support(self.support)

    @property
    def covariance(self) -> Array:
        """(p, p) of the errors of the constants in `order`, in log space."""
        deviations = np.array([self.constants[name].log_deviation for name in self.order])
        scaled: Array = self.correlation * np.outer(deviations, deviations)
        return scaled

    @property
    def conformal(self) -> Conformal:
        """The widths of the intervals."""
        return Conformal(quantiles=self.quantiles, floor=self.floor, coverage=self.coverage)

    @property
    def ranges(self) -> Support:
        """The calibrated ranges."""
        return Support(self.support)


def _correlation(matrix: Array | NDArray[np.float64], count: int) -> Array:
    """Its lower triangle mirrored, so that what is written and read is the same to the last bit."""
    array = np.asarray(matrix, np.float64)
    if array.shape != (count, count) or not np.all(np.isfinite(array)):
        raise PlanError(
            f"correlation has shape {array.shape} or is not finite: it should be ({count}, {count})"
        )
    lower = np.tril(array, -1)
    whole: Array = lower + lower.T + np.eye(count)
    if not np.allclose(array, whole, atol=1e-6) or np.abs(whole).max(initial=0.0) > 1 + 1e-9:
        raise PlanError("correlation is not symmetric with ones on its diagonal: fit again")
    if count and float(np.linalg.eigvalsh(whole)[0]) < -1e-6:
        raise PlanError("correlation has a negative eigenvalue: fit again")
    return whole


FORMAT = 2
"""One more where the constants of older files would mean something else."""

_HEAD = """\
# Calibration of the efficiency model of Outlast: constants with their errors, and how wide the
# intervals of predictions are. The digest tells whether the file was changed after it was written;
# remove that line to edit the file by hand.
"""

_TOP = {
    "format": int,
    "digest": str,
    "floor": (int, float),
    "coverage": (int, float),
    "provenance": dict,
    "constants": dict,
    "correlation": dict,
    "quantiles": dict,
    "support": dict,
    "residual": dict,
    "places": dict,
}

_OPTIONAL = {"digest", "residual", "places"}


def write_calibration(calibration: Calibration, path: Path | str) -> None:
    """Writes a calibration as TOML; `path` holds the old text or the new, never a mixture.

    Raises:
        PlanError: The file cannot be written.
    """
    # Reading is part of every prediction; the records take half of its import time.
    from outlast.records import replace_file

    try:
        replace_file(Path(path), to_text(calibration).encode())
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from None


def read_calibration(path: Path | str) -> Calibration:
    """Reads what `write_calibration` wrote, exactly.

    Raises:
        PlanError: The file cannot be read, is damaged, or says something that is not possible.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PlanError(f"{path} cannot be read as a calibration: {reason}") from None
    return from_text(text, str(path))


def to_text(calibration: Calibration) -> str:
    """The TOML text."""
    tables = _tables(calibration)
    lines = [_HEAD + f'digest = "{_digest(tables)}"']
    lines += [f"{name} = {_value(value)}" for name, value in tables.items() if _plain(value)]
    for name, value in tables.items():
        if not _plain(value):
            lines += ["", *_table_lines(name, value)]
    return "\n".join([*lines, ""])


def from_text(text: str, source: str = "the calibration") -> Calibration:
    """Reads the TOML text.

    Raises:
        PlanError: As `read_calibration`, with `source` as the file's name.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is damaged: {error}; calibrate again") from None
    check_keys(tables, _TOP, _OPTIONAL, source)
    if tables["format"] != FORMAT:
        raise PlanError(
            f"{source} has format = {tables['format']}, this version reads {FORMAT}: calibrate "
            "again"
        )
    digest = tables.pop("digest", None)
    if digest is not None and digest != _digest(tables):
        raise PlanError(
            f"{source} was changed or damaged after it was written: calibrate again, or remove its "
            "line `digest` if the change was meant"
        )
    try:
        return _calibration(tables, source)
    except PlanError as error:
        named = str(error) if str(error).startswith(source) else f"{source}: {error}"
        raise PlanError(named) from None


def _tables(calibration: Calibration) -> dict[str, Any]:
    lower = [
        [float(value) for value in calibration.correlation[row, :row]]
        for row in range(1, len(calibration.order))
    ]
    tables: dict[str, Any] = {
        "format": FORMAT,
        "floor": float(calibration.floor),
        "coverage": float(calibration.coverage),
        "provenance": _listed(asdict(calibration.provenance)),
        "constants": {
            name: _listed(asdict(constant)) for name, constant in calibration.constants.items()
        },
        "correlation": {"order": list(calibration.order), "lower": lower},
        "quantiles": {name: float(value) for name, value in calibration.quantiles.items()},
        "support": {
            name: [float(low), float(high)] for name, (low, high) in calibration.support.items()
        },
    }
    if calibration.places:
        tables["places"] = {
            name: {
                "utilisation": {key: float(share) for key, share in place.utilisation.items()},
                "ranges": {
                    key: [float(low), float(high)]
                    for key, (low, high) in place.ranges.ranges.items()
                },
            }
            for name, place in calibration.places.items()
        }
    if calibration.residual is not None:
        tables["residual"] = _listed(
            {
                field.name: getattr(calibration.residual, field.name)
                for field in fields(ResidualPoints)
            }
        )
    return tables


def _listed(value: Any) -> Any:
    """Tuples and arrays as lists, NumPy numbers as Python's."""
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_listed(inner) for inner in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _digest(tables: Mapping[str, Any]) -> str:
    text = json.dumps(tables, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> bool:
    return not isinstance(value, dict)


def _table_lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    if name == "constants":
        for inner, constant in table.items():
            yield f"[constants.{_key(inner)}]"
            yield from (f"{_key(field)} = {_value(item)}" for field, item in constant.items())
            yield ""
        if not table:
            yield "[constants]"
        return
    yield f"[{name}]"
    for inner, value in table.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            yield f"{_key(inner)} = ["
            yield from (f"    {_value(row)}," for row in value)
            yield "]"
        else:
            yield f"{_key(inner)} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
        )
    if isinstance(value, str):
        return _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    # TOML's escapes are those of JSON, but TOML also forbids a raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quoted(text)


_CONSTANT = {"value": NUMBER, "log_deviation": NUMBER, "unit": str, "origin": str, "group": str}

_PROVENANCE = {
    "date": str,
    "version": str,
    "rows": list,
    "sources": list,
    "flagged": list,
    "text": str,
}

_RESIDUAL = {
    "names": list,
    "features": list,
    "places": list,
    "residuals": list,
    "noises": list,
    "amplitude": NUMBER,
    "length_scales": list,
}


def _calibration(tables: Mapping[str, Any], source: str) -> Calibration:
    constants = {}
    for name, table in tables["constants"].items():
        where = f"{source}: constants.{name}"
        if not isinstance(table, dict):
            raise PlanError(f"{where} = {str(table)[:60]!r} must be a table")
        check_keys(table, _CONSTANT, {"group"}, where)
        constants[name] = Constant(**table)
    check_keys(tables["correlation"], {"order": list, "lower": list}, set(), source)
    order = texts(tables["correlation"]["order"], f"{source}: correlation.order")
    return Calibration(
        constants=constants,
        order=order,
        correlation=_matrix(tables["correlation"]["lower"], len(order), source),
        residual=_residual(tables.get("residual"), source),
        quantiles={
            name: number(value, f"{source}: quantiles.{name}")
            for name, value in tables["quantiles"].items()
        },
        floor=tables["floor"],
        coverage=tables["coverage"],
        support={
            name: _range(value, f"{source}: support.{name}")
            for name, value in tables["support"].items()
        },
        provenance=_provenance(tables["provenance"], f"{source}: provenance"),
        places={
            name: _place(table, f"{source}: places.{name}")
            for name, table in tables.get("places", {}).items()
        },
    )


def _place(table: Any, where: str) -> Place:
    if not isinstance(table, dict):
        raise PlanError(f"{where} = {str(table)[:60]!r} must be a table")
    check_keys(table, {"utilisation": dict, "ranges": dict}, set(), where)
    ranges = {name: _range(value, f"{where}.{name}") for name, value in table["ranges"].items()}
    shares = {
        name: number(value, f"{where}.{name}") for name, value in table["utilisation"].items()
    }
    return Place(Support(ranges), shares)


def _provenance(table: Mapping[str, Any], where: str) -> Provenance:
    check_keys(table, _PROVENANCE, {"rows", "sources", "flagged", "text"}, where)
    lists = {
        name: texts(table.get(name, []), f"{where}.{name}")
        for name in ("rows", "sources", "flagged")
    }
    return Provenance(
        date=table["date"], version=table["version"], text=table.get("text", ""), **lists
    )


def _range(value: Any, where: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(f"{where} = {str(value)[:60]!r} must be [lowest, highest]")
    return number(value[0], where), number(value[1], where)


def _matrix(lower: Sequence[Any], count: int, source: str) -> Any:
    where = f"{source}: correlation.lower"
    wrong = f"{where} must have rows of 1 to {count - 1} numbers, one per pair of `order`"
    if len(lower) != max(count - 1, 0):
        raise PlanError(wrong)
    matrix = np.eye(count)
    for row, values in enumerate(lower, 1):
        if not isinstance(values, list) or len(values) != row:
            raise PlanError(wrong)
        matrix[row, :row] = matrix[:row, row] = [number(value, where) for value in values]
    return matrix


def _residual(table: Mapping[str, Any] | None, source: str) -> ResidualPoints | None:
    if table is None:
        return None
    where = f"{source}: residual"
    check_keys(table, _RESIDUAL, set(), where)
    names, places = texts(table["names"], where), texts(table["places"], where)
    try:
        arrays = {
            name: np.array(table[name], np.float64)
            for name in ("residuals", "noises", "length_scales")
        }
        features = np.array(table["features"], np.float64).reshape(len(places), len(names))
    except (ValueError, TypeError):
        raise PlanError(f"{where} has rows of unequal length or no numbers") from None
    return ResidualPoints(
        names=names, places=places, features=features, amplitude=float(table["amplitude"]), **arrays
    )
