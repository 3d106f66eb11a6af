"""A calibration as readable TOML that can be shared; `calibrated` has the meaning of the fields.

calibration = read_calibration("h100.calibration.toml")
calibration.constants["matmul_efficiency"].value
calibration.conformal.interval(2.0, 0.03, "nanotron on h100-sxm")

Reading is strict: an unknown or missing key, a number out of its range, and a file that was changed
after it was written are refused. A digest of the content tells the last; whoever edits a file on
purpose removes that line.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from outlast.errors import PlanError
from outlast.plan.calibration.calibrated import (
    Calibration,
    Constant,
    Provenance,
    ResidualPoints,
)
from outlast.plan.calibration.strict import NUMBER, check_keys, number, texts
from outlast.plan.calibration.support import Place, Support

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


_CONSTANT = {
    "value": NUMBER,
    "log_deviation": NUMBER,
    "unit": str,
    "origin": str,
    "group": str,
}
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
        names=names,
        places=places,
        features=features,
        amplitude=float(table["amplitude"]),
        **arrays,
    )
