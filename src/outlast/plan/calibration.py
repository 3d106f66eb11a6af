"""Calibrations: constants with errors, ranges, provenance, and their TOML file.

calibration = read_calibration("h100.calibration.toml")
calibration.constants["matmul_efficiency"].value
step_model_of(calibration).half_widths(cases, whose)

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from outlast.errors import PlanError
from outlast.paths import read_text
from outlast.plan.batch import Array
from outlast.plan.conformal import Conformal, Place, Support
from outlast.plan.constants import LEVELS, NAMES, PRIORS
from outlast.plan.step_fit import FEATURES, Column, Fit, Residual
from outlast.plan.step_model import StepModel

NUMBER = (int, float)


def check_keys(
    table: Mapping[str, Any], kinds: Mapping[str, Any], optional: Collection[str], where: str
) -> None:
    """Refuses what is no table, or one with other keys or types than expected.

    Args:
        table: As TOML was read.
        kinds: Known keys and the type of each.
        optional: Those that may be missing.
        where: File and table, for the sentence.

    Raises:
        PlanError: A key is unknown ("did you mean"), missing, or has a value of another type.
    """
    if not isinstance(table, Mapping):
        raise PlanError(f"{where} = {str(table)[:60]!r} must be a table")
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


def kinds_of(cls: type[Any]) -> tuple[dict[str, Any], set[str]]:
    """Type of each compared field of a dataclass in TOML, and the fields that have a default."""
    hints = get_type_hints(cls)
    plain = {float: NUMBER, int: int, bool: bool, tuple[str, ...]: list}
    named = [item for item in fields(cls) if item.compare]
    # Choices are texts.
    kinds = {item.name: plain.get(hints[item.name], str) for item in named}
    return kinds, {item.name for item in named if item.default is not MISSING}


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
        widths: How wide intervals are, by group, with `conformal.OTHERS` for all others.
        support: Calibrated range of each feature.
        provenance: Where it comes from.
        places: What was measured, by interval group; empty in files of older versions, whose
            groups do not tell clusters apart, so that none counts as calibrated.
    """

    constants: Mapping[str, Constant]
    order: tuple[str, ...]
    correlation: Array
    residual: Residual | None = None
    widths: Conformal
    support: Support
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
        # Its lower triangle mirrored, so that what is written and read is the same to the last bit.
        array, count = np.asarray(self.correlation, np.float64), len(self.order)
        if array.shape != (count, count) or not np.all(np.isfinite(array)):
            raise PlanError(
                f"correlation has shape {array.shape} or is not finite: it should be ({count}, "
                f"{count})"
            )
        lower = np.tril(array, -1)
        whole: Array = lower + lower.T + np.eye(count)
        if not np.allclose(array, whole, atol=1e-6) or np.abs(whole).max(initial=0.0) > 1 + 1e-9:
            raise PlanError("correlation is not symmetric with ones on its diagonal: fit again")
        if count and float(np.linalg.eigvalsh(whole)[0]) < -1e-6:
            raise PlanError("correlation has a negative eigenvalue: fit again")
        object.__setattr__(self, "correlation", whole)


_FOR = " for "


def calibration_of(
    model: StepModel, provenance: Provenance, further: Mapping[str, Constant] | None = None
) -> Calibration:
    """Content of a calibration file for a fitted model.

    Args:
        model: Of the time.
        provenance: Where it comes from.
        further: Constants of other models, by name.
    """
    fitted = model.constants
    deviations = np.sqrt(np.diag(fitted.covariance))
    names = tuple(
        f"{column.constant}{_FOR}{column.level} {column.group}" if column.level else column.constant
        for column in fitted.columns
    )
    rows = zip(names, fitted.columns, fitted.values, deviations, strict=True)
    constants = {
        name: _constant(column, float(value), float(deviation))
        for name, column, value, deviation in rows
    }
    scale = np.outer(deviations, deviations)
    return Calibration(
        constants={**constants, **(further or {})},
        order=names,
        correlation=fitted.covariance / np.where(scale > 0.0, scale, 1.0),
        residual=model.residual,
        widths=model.widths,
        support=model.support,
        provenance=provenance,
        places=model.places,
    )


def step_model_of(calibration: Calibration) -> StepModel:
    """The model that a calibration describes.

    Raises:
        PlanError: It has constants that this version does not know, or lacks some.
    """
    columns = tuple(_column(name) for name in calibration.order)
    missing = sorted(set(NAMES) - {column.constant for column in columns if column.level is None})
    if missing:
        raise PlanError(
            f"the calibration lacks {', '.join(missing)}: calibrate again with this version"
        )
    own = [calibration.constants[name] for name in calibration.order]
    values = [_position(column, constant) for column, constant in zip(columns, own, strict=True)]
    deviations = np.array([constant.log_deviation for constant in own])
    return StepModel(
        Fit(columns, np.array(values), calibration.correlation * np.outer(deviations, deviations)),
        calibration.residual,
        calibration.widths,
        calibration.support,
        len(calibration.provenance.rows),
        calibration.places,
    )


def _column(name: str) -> Column:
    constant, _, belonging = name.partition(_FOR)
    level, _, group = belonging.partition(" ")
    known = [item for item in LEVELS if item == level]
    if constant not in PRIORS or (belonging and not known):
        raise PlanError(
            f"constant {name!r} of the calibration is not one of this version's: calibrate again"
        )
    return Column(constant, known[0], group) if known else Column(constant)


def _constant(column: Column, value: float, deviation: float) -> Constant:
    """The common constant in its own unit; a group's as a factor (on the odds, below a bound)."""
    prior = PRIORS[column.constant]
    if column.level is not None:
        group = f"{column.level} {column.group}"
        return Constant(float(np.exp(value)), deviation, "factor", "calibrated", group)
    median = prior.unbounded(np.array(prior.median))
    return Constant(float(prior.bounded(median + value)), deviation, prior.unit, "calibrated")


def _position(column: Column, constant: Constant) -> float:
    """The inverse of `_constant`."""
    if column.level is not None:
        return float(np.log(constant.value))
    prior = PRIORS[column.constant]
    median = prior.unbounded(np.array(prior.median))
    return float(prior.unbounded(np.array(constant.value)) - median)


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
    "floor": NUMBER,
    "coverage": NUMBER,
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
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PlanError(f"{path} cannot be read as a calibration: {reason}") from None
    return from_text(text, str(path))


def to_text(calibration: Calibration) -> str:
    """The TOML text."""
    from outlast.job.section import toml_value

    def key(text: str) -> str:
        return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else toml_value(text)

    tables = _tables(calibration)
    lines = [_HEAD + f'digest = "{_digest(tables)}"']
    for name, value in tables.items():
        if not isinstance(value, dict):
            lines.append(f"{name} = {toml_value(value)}")
    constants = tables["constants"]
    sections = {name: table for name, table in tables.items() if isinstance(table, dict)}
    for name, table in sections.items():
        if table is constants and constants:
            for inner, constant in constants.items():
                lines += ["", f"[constants.{key(inner)}]"]
                lines += [f"{key(field)} = {toml_value(item)}" for field, item in constant.items()]
            lines.append("")
            continue
        lines += ["", f"[{name}]"]
        for inner, value in table.items():
            if isinstance(value, list) and value and isinstance(value[0], list):
                rows = [f"    {toml_value(row)}," for row in value]
                lines += [f"{key(inner)} = [", *rows, "]"]
            else:
                lines.append(f"{key(inner)} = {toml_value(value)}")
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
        "floor": float(calibration.widths.floor),
        "coverage": float(calibration.widths.coverage),
        "provenance": _listed(asdict(calibration.provenance)),
        "constants": {
            name: _listed(asdict(constant)) for name, constant in calibration.constants.items()
        },
        "correlation": {"order": list(calibration.order), "lower": lower},
        "quantiles": _listed(calibration.widths.quantiles),
        "support": _listed(calibration.support.ranges),
    }
    if calibration.places:
        tables["places"] = {
            name: {
                "utilisation": _listed(place.utilisation),
                "ranges": _listed(place.ranges.ranges),
            }
            for name, place in calibration.places.items()
        }
    if (points := calibration.residual) is not None:
        tables["residual"] = _listed(
            {
                "names": FEATURES,
                "features": points.features,
                "places": points.places,
                "residuals": points.residuals,
                "noises": points.noises,
                "amplitude": points.amplitude,
                "length_scales": [points.length] * len(FEATURES),
            }
        )
    return tables


def _listed(value: Any) -> Any:
    """Tuples and arrays as lists, NumPy numbers as Python's."""
    if isinstance(value, Mapping):
        return {name: _listed(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_listed(inner) for inner in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _digest(tables: Mapping[str, Any]) -> str:
    text = json.dumps(tables, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _calibration(tables: Mapping[str, Any], source: str) -> Calibration:
    constants = {}
    for name, table in tables["constants"].items():
        check_keys(table, *kinds_of(Constant), f"{source}: constants.{name}")
        constants[name] = Constant(**table)
    check_keys(tables["correlation"], {"order": list, "lower": list}, set(), source)
    order = texts(tables["correlation"]["order"], f"{source}: correlation.order")
    places = {}
    for name, table in tables.get("places", {}).items():
        where = f"{source}: places.{name}"
        check_keys(table, {"utilisation": dict, "ranges": dict}, set(), where)
        shares = {
            key: number(value, f"{where}.{key}") for key, value in table["utilisation"].items()
        }
        places[name] = Place(_ranges(table["ranges"], where), shares)
    provenance, where = tables["provenance"], f"{source}: provenance"
    check_keys(provenance, *kinds_of(Provenance), where)
    lists = {
        name: texts(value, f"{where}.{name}")
        for name, value in provenance.items()
        if isinstance(value, list)
    }
    widths = Conformal(
        quantiles={
            name: number(value, f"{source}: quantiles.{name}")
            for name, value in tables["quantiles"].items()
        },
        floor=tables["floor"],
        coverage=tables["coverage"],
    )
    return Calibration(
        constants=constants,
        order=order,
        correlation=_matrix(tables["correlation"]["lower"], len(order), source),
        residual=_residual(tables["residual"], source) if "residual" in tables else None,
        widths=widths,
        support=_ranges(tables["support"], f"{source}: support"),
        provenance=Provenance(**{**provenance, **lists}),
        places=places,
    )


def _ranges(table: Mapping[str, Any], where: str) -> Support:
    found = {}
    for name, value in table.items():
        here = f"{where}.{name}"
        if not isinstance(value, list) or len(value) != 2:
            raise PlanError(f"{here} = {str(value)[:60]!r} must be [lowest, highest]")
        found[name] = number(value[0], here), number(value[1], here)
    return Support(found)


def _matrix(lower: Sequence[Any], count: int, source: str) -> Array:
    where = f"{source}: correlation.lower"
    sizes = [len(values) if isinstance(values, list) else 0 for values in lower]
    if sizes != [*range(1, count)]:
        raise PlanError(
            f"{where} must have rows of 1 to {count - 1} numbers, one per pair of `order`"
        )
    matrix = np.eye(count)
    for row, values in enumerate(lower, 1):
        matrix[row, :row] = matrix[:row, row] = [number(value, where) for value in values]
    return matrix


_RESIDUAL = {
    "names": list,
    "features": list,
    "places": list,
    "residuals": list,
    "noises": list,
    "amplitude": NUMBER,
    "length_scales": list,
}


def _residual(table: Mapping[str, Any], source: str) -> Residual:
    where = f"{source}: residual"
    check_keys(table, _RESIDUAL, set(), where)
    names, places = texts(table["names"], where), texts(table["places"], where)
    rows, columns = len(places), len(names)
    try:
        arrays = {
            name: np.array(table[name], np.float64)
            for name in ("features", "residuals", "noises", "length_scales")
        }
    except (ValueError, TypeError):
        raise PlanError(f"{where} has rows of unequal length or no numbers") from None
    arrays["features"] = arrays["features"].reshape(-1, columns)
    for name, shape in (
        ("features", (rows, columns)),
        ("residuals", (rows,)),
        ("noises", (rows,)),
        ("length_scales", (columns,)),
    ):
        if arrays[name].shape != shape or not np.all(np.isfinite(arrays[name])):
            raise PlanError(
                f"residual.{name} has shape {arrays[name].shape} or is not finite: it should be "
                f"{shape}"
            )
    noises, lengths, amplitude = arrays["noises"], arrays["length_scales"], table["amplitude"]
    if not (np.all(noises >= 0) and np.all(lengths > 0) and amplitude >= 0):
        raise PlanError("residual has a noise or amplitude below 0 or a length scale of 0")
    if names != FEATURES or np.ptp(lengths) > 0.0:
        raise PlanError(
            "the calibration's residual has other features than this version's: calibrate again"
        )
    return Residual(
        arrays["features"], places, arrays["residuals"], noises, float(amplitude), float(lengths[0])
    )
