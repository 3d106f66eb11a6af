"""A figure with its unit, kind and source, and the explicit absence of one."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from outlast.errors import HardwareError

Kind: TypeAlias = Literal["datasheet", "measured", "published", "unverified"]
KINDS: tuple[str, ...] = get_args(Kind)

# The longest ending that fits wins: `_bytes_per_s` comes before a bare `_s` could.
UNITS: dict[str, str] = {
    "_flop_per_s": "FLOP/s",
    "_bytes_per_s": "B/s",
    "_bytes": "B",
    "_watts": "W",
    "_seconds": "s",
    "_hz": "Hz",
    "_count": "1",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that says what it is.

    Attributes:
        value: The number, in `unit`.
        unit: SI base unit: "FLOP/s", "B/s", "B", "W", "s", "Hz", or "1" for a count.
        kind: "datasheet" (the vendor's specification), "measured" (run on such hardware by the
            source), "published" (quoted without its method) or "unverified".
        source: Where the number comes from, in words that let a reader find it.
    """

    value: float
    unit: str
    kind: Kind
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.kind}: {self.source})"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Fact that is not known or cannot be read, with the reason. Never a zero.

    Arithmetic on it raises TypeError, and so does using it as a truth value: ask with
    ``isinstance(x, Unavailable)``. `value` raises `HardwareError` with the reason, so that
    ``device("h200-sxm").bf16_peak_flop_per_s.value`` is safe to write in one line.

    Attributes:
        reason: What is missing, in a few words.
        remedy: Command or action that provides it; empty where there is none.
    """

    reason: str
    remedy: str = ""

    @property
    def value(self) -> NoReturn:
        """Never returns.

        Raises:
            HardwareError: Always, with the reason and the remedy.
        """
        raise HardwareError(f"{self.reason}: {self.remedy}" if self.remedy else self.reason)

    def __bool__(self) -> NoReturn:
        message = "Unavailable is neither true nor false: use isinstance(x, Unavailable)"
        raise TypeError(message)

    def __str__(self) -> str:
        return f"unavailable: {self.reason}" + (f" ({self.remedy})" if self.remedy else "")


Quantity: TypeAlias = Figure | Unavailable

NOT_RECORDED = Unavailable("no figure is recorded")
"""Default of every quantity of a hand-made device, link or node."""


def unit_of(name: str) -> str:
    """Return the unit that a figure's name ends with.

    Raises:
        HardwareError: The name ends with no known unit.
    """
    for ending, unit in UNITS.items():
        if f"_{name}".endswith(ending):
            return unit
    raise HardwareError(f"{name} does not end with a unit: {', '.join(UNITS)}")


def plain(value: Any, keyed: Any = ()) -> Any:
    """Dataclasses and tuples as plain JSON types; what is missing with reason and remedy.

    Args:
        value: Of numbers, texts, dataclasses and tuples of these.
        keyed: Type of which only the key is told, e.g. `Device`.
    """
    if isinstance(value, Unavailable):
        return {"unavailable": value.reason, "remedy": value.remedy}
    if isinstance(value, keyed):
        return value.key
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name), keyed) for field in fields(value)}
    return [plain(item, keyed) for item in value] if isinstance(value, tuple) else value
