"""Faults as short text: what goes wrong, where, when and for how long.

``linear.output:module=*.mlp.*:bit=14:every=5`` flips bit 14 of one number of the output of one such
layer in every fifth step; ``kill:step=12:rank=1`` kills a process. `parse_fault` reads such text,
and ``str`` gives it back.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

from outlast.errors import GuardError
from outlast.guard.inject.patterns import Pattern
from outlast.guard.seam import SITES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Number = TypeVar("Number", int, float)

Duration = Literal["transient", "intermittent", "permanent"]
"""transient: once, and not in a recomputation; intermittent: at any use, with a probability;
permanent: at every use. The last two strike the same unit each time."""

ProcessKind = Literal["kill", "stop", "disk-full"]
"""kill: SIGKILL; stop: SIGSTOP for some seconds; disk-full: writes to files fail for some steps."""

_ANY_BIT = Pattern()
PROCESS_KINDS: tuple[ProcessKind, ...] = ("kill", "stop", "disk-full")


@dataclass(frozen=True)
class Fault:
    """Wrong numbers at one site.

    Attributes:
        site: One of `outlast.guard.seam.SITES`.
        pattern: What happens to the numbers.
        module: Name pattern, as in a shell, of the modules one of which is struck.
        duration: See `Duration`.
        step: The first step concerned.
        every: Of a transient fault: also every so many steps after `step`; 0 for once only.
        probability: Of an intermittent fault, per use.
        occurrence: Of a transient fault: which use of the site in the step, from 0; with gradient
            accumulation each microbatch uses it once.
        position: Row-major index of the number struck; None draws it.
        rank: The process concerned.
    """

    site: str
    pattern: Pattern = _ANY_BIT
    module: str = "*"
    duration: Duration = "transient"
    step: int = 0
    every: int = 0
    probability: float = 1.0
    occurrence: int = 0
    position: int | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        if self.site not in SITES:
            raise GuardError(_unknown("fault site", self.site, (*SITES, *PROCESS_KINDS)))
        for name in ("step", "every", "occurrence", "position", "rank"):
            if (getattr(self, name) or 0) < 0:
                raise GuardError(f"{name} = {getattr(self, name)} of a fault is below 0")
        if self.duration != "transient" and (self.every or self.occurrence):
            raise GuardError(
                f"every and occurrence belong to transient faults; this one is {self.duration}: "
                "leave them out"
            )
        if not 0.0 < self.probability <= 1.0:
            raise GuardError(
                f"intermittent = {self.probability} is no probability; give one above 0 and at "
                "most 1"
            )

    def due(self, step: int) -> bool:
        """Whether the fault may strike in this step."""
        if step < self.step:
            return False
        if self.duration != "transient":
            return True
        return (step - self.step) % self.every == 0 if self.every else step == self.step

    def __str__(self) -> str:
        parts = [self.site]
        parts += [f"module={self.module}"] if self.module != "*" else []
        parts += _pattern_parts(self.pattern)
        if self.duration == "intermittent":
            parts.append(f"intermittent={self.probability!r}")
        elif self.duration == "permanent":
            parts.append("permanent")
        parts += _number_parts(self, ("step", "every", "occurrence", "position", "rank"))
        return ":".join(parts)


@dataclass(frozen=True)
class ProcessFault:
    """Something that happens to a process at the beginning of a step.

    Attributes:
        kind: See `ProcessKind`.
        step: The step.
        rank: The process.
        seconds: How long a stop lasts.
        steps: How many steps a full disk lasts.
        room_bytes: What a file may still hold while the disk is full.
    """

    kind: ProcessKind
    step: int
    rank: int = 0
    seconds: float = 10.0
    steps: int = 1
    room_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("step", "rank", "room_bytes"):
            if getattr(self, name) < 0:
                raise GuardError(f"{name} = {getattr(self, name)} of {self.kind} is below 0")
        if not 0.0 < self.seconds < math.inf:
            raise GuardError(f"seconds = {self.seconds} of stop is not a finite time above 0")
        if self.steps < 1:
            raise GuardError(f"steps = {self.steps} of disk-full is below 1")

    def __str__(self) -> str:
        parts = [self.kind, f"step={self.step}"]
        parts += _number_parts(self, ("rank", "seconds", "steps", "room_bytes"))
        return ":".join(parts)


def parse_faults(texts: Iterable[str]) -> tuple[Fault | ProcessFault, ...]:
    """All faults of a drill; one text may hold several, with commas between.

    Raises:
        GuardError: For the first that cannot be read.
    """
    pieces = (piece.strip() for text in texts for piece in text.split(","))
    return tuple(parse_fault(piece) for piece in pieces if piece)


def parse_fault(text: str) -> Fault | ProcessFault:
    """Read ``SITE:key=value:...`` or ``kill:step=N`` and the like.

    Of wrong numbers: one of ``bit=K|any``, ``bits=K+L``, ``carry=+K|-K|any``, ``stuck=VALUE``,
    ``nan``, ``inf`` (without: ``bit=any``); ``segment=N`` or ``stride=N``; ``cast=before``; one of
    ``transient``, ``intermittent=P``, ``permanent`` (without: transient); ``module``, ``step``,
    ``every``, ``occurrence``, ``position``, ``rank``. Of processes: ``step``, ``rank``; ``seconds``
    of stop; ``steps`` and ``room_bytes`` of disk-full.

    Raises:
        GuardError: With the part that cannot be read and what could stand there.
    """
    name, *parts = text.strip().split(":")
    pairs: dict[str, str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key in pairs:
            raise GuardError(f"{key} stands twice in the fault {text!r}; give it once")
        pairs[key] = value
    try:
        if name in PROCESS_KINDS:
            return _process_fault(name, pairs)
        if name not in SITES:
            raise GuardError(_unknown("fault site", name, (*SITES, *PROCESS_KINDS)))
        return _number_fault(name, pairs)
    except GuardError as error:
        raise GuardError(f"fault {text!r}: {error}") from None


def _process_fault(kind: ProcessKind, pairs: dict[str, str]) -> ProcessFault:
    known: dict[ProcessKind, dict[str, Callable[[str], float]]] = {
        "kill": {},
        "stop": {"seconds": float},
        "disk-full": {"steps": int, "room_bytes": int},
    }
    readers: dict[str, Callable[[str], float]] = {"step": int, "rank": int, **known[kind]}
    values: dict[str, float] = {}
    for key, value in pairs.items():
        if key not in readers:
            raise GuardError(_unknown(f"key of {kind}", key, readers))
        values[key] = _read(key, value, readers[key])
    if "step" not in values:
        raise GuardError(f"{kind} needs a step, as in {kind}:step=12")
    return ProcessFault(kind, **values)  # type: ignore[arg-type]


def _number_fault(site: str, pairs: dict[str, str]) -> Fault:
    pattern = _pattern(pairs)
    values: dict[str, object] = {}
    if "module" in pairs:
        values["module"] = pairs.pop("module")
    duration = _one_of(pairs, ("transient", "intermittent", "permanent"))
    if duration is not None:
        values["duration"] = duration[0]
        if duration[0] == "intermittent":
            values["probability"] = _read(*duration, float)
        elif duration[1]:
            raise GuardError(f"{duration[0]} takes no value, not {duration[1]!r}")
    for key in ("step", "every", "occurrence", "position", "rank"):
        if key in pairs:
            values[key] = _read(key, pairs.pop(key), int)
    if pairs:
        known = (*_CHANGES, "segment", "stride", "cast", "transient", "intermittent", "permanent")
        names = (*known, "module", "step", "every", "occurrence", "position", "rank")
        raise GuardError(_unknown("key of wrong numbers", next(iter(pairs)), names))
    fault = Fault(site, pattern, **values)  # type: ignore[arg-type]
    if fault.duration == "transient" and not values.keys() & {"step", "every"}:
        raise GuardError("a transient fault needs a time, as in step=12 or every=5")
    return fault


_CHANGES = ("bit", "bits", "carry", "stuck", "nan", "inf")


def _pattern(pairs: dict[str, str]) -> Pattern:
    """Take the keys of a pattern out of `pairs`."""
    values: dict[str, object] = {}
    chosen = _one_of(pairs, _CHANGES)
    if chosen is not None:
        key, text = chosen
        if key in ("bit", "bits"):
            values["bits"] = () if text == "any" else _bits(key, text)
        elif key == "carry":
            values["change"] = "carry"
            values["sign"] = -1 if text.startswith("-") else 1
            number = text.lstrip("+-")
            values["bits"] = () if number == "any" else _bits(key, number)[:1]
        else:
            values["change"] = "stuck"
            values["value"] = float(key) if key != "stuck" else _read(key, text, float)
    extent = _one_of(pairs, ("segment", "stride"))
    if extent is not None:
        values["extent"] = extent[0]
        values["length"] = length = _read(*extent, int)
        if length < 1:
            raise GuardError(f"{extent[0]} = {length} is below 1")
    if "cast" in pairs:
        if (cast := pairs.pop("cast")) != "before":
            raise GuardError(f"cast = {cast!r} is not before; leave it out for stored numbers")
        values["before_cast"] = True
    return Pattern(**values)  # type: ignore[arg-type]


def _bits(key: str, text: str) -> tuple[int, ...]:
    bits = tuple(_read(key, part, int) for part in text.split("+"))
    if min(bits) < 0 or max(bits) > 63:
        raise GuardError(f"{key} = {text} is not within 0 to 63")
    return tuple(sorted(set(bits)))


def _one_of(pairs: dict[str, str], names: tuple[str, ...]) -> tuple[str, str] | None:
    given = [name for name in names if name in pairs]
    if len(given) > 1:
        raise GuardError(f"{' and '.join(given)} exclude each other; give one")
    return (given[0], pairs.pop(given[0])) if given else None


def _read(key: str, text: str, kind: Callable[[str], Number]) -> Number:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise GuardError(f"{key} = {text!r} is not {what}") from None


def _unknown(what: str, given: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    return f"{given!r} is no {what}; {hint}"


def _pattern_parts(pattern: Pattern) -> list[str]:
    if pattern.change == "flip":
        key = "bits" if len(pattern.bits) > 1 else "bit"
        parts = [f"{key}={'+'.join(map(str, pattern.bits)) or 'any'}"]
    elif pattern.change == "carry":
        sign = "-" if pattern.sign < 0 else "+"
        parts = [f"carry={sign}{pattern.bits[0] if pattern.bits else 'any'}"]
    elif math.isnan(pattern.value):
        parts = ["nan"]
    elif pattern.value == math.inf:
        parts = ["inf"]
    else:
        parts = [f"stuck={pattern.value!r}"]
    if pattern.extent != "element":
        parts.append(f"{pattern.extent}={pattern.length}")
    return [*parts, "cast=before"] if pattern.before_cast else parts


def _number_parts(fault: Fault | ProcessFault, names: tuple[str, ...]) -> list[str]:
    """``name=value`` of what differs from its default; a transient's only time is always given."""
    default = {field.name: field.default for field in fields(fault)}
    given = [name for name in names if getattr(fault, name) != default[name]]
    if isinstance(fault, Fault) and fault.duration == "transient" and not fault.every:
        given = ["step", *(name for name in given if name != "step")]
    return [f"{name}={getattr(fault, name)!r}" for name in given]
