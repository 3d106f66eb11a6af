"""Faults as short text (what goes wrong, where, when and for how long) and put into a run.

``linear.output:module=*.mlp.*:bit=14:every=5`` flips bit 14 of one number of the output of one such
layer in every fifth step; ``kill:step=12:rank=1`` kills a process. `parse_fault` reads such text,
and ``str`` gives it back.

Numbers are changed through integer views of the same size, as the hardware would: neither autograd
nor the version counter of a parameter notices. Bits are counted from 0, the lowest of the
significand; the highest is the sign. Process faults happen to a whole process at the beginning of a
step.

The `Injector` is a fault_hook that puts faults into a run. Every choice (module, element, bits,
whether an intermittent fault shows) is a function of the seed, the fault, the step, the attempt and
the number of the use, so a drill repeats itself exactly, and a run without protection meets the
same faults as a protected one.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import random
import resource
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from outlast.errors import GuardError
from outlast.guard.findings import ANYWHERE, SITES
from outlast.guard.residual import bits as bits_of
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from torch import Tensor

    from outlast.guard.handle import Guard


Change = Literal["flip", "carry", "stuck"]
"""flip: bits are inverted; carry: 2^k is added to or taken from the magnitude's integer, as a wrong
or missing carry does; stuck: a fixed value, also NaN or infinity."""

Extent = Literal["element", "segment", "stride"]
"""element: one number; segment: neighbours in a row, such as the lanes of a warp; stride: every
n-th number of a row."""

_WIDE_BITS = 32


# How many of float32's lowest significand bits rounding to the type removes.
_REMOVED_BITS = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class Pattern:
    """Change of stored numbers around a position.

    Attributes:
        change: See `Change`.
        bits: To flip, or the one k of a carry; empty: one is drawn for every injection.
        sign: Of a carry: +1 wrongly added, -1 missing.
        value: Of stuck numbers.
        extent: See `Extent`.
        length: Numbers of a segment, or the period of a stride.
        before_cast: The change hits the float32 value that is then rounded to its 16-bit type.
    """

    change: Change = "flip"
    bits: tuple[int, ...] = ()
    sign: int = 1
    value: float = 0.0
    extent: Extent = "element"
    length: int = 1
    before_cast: bool = False

    def __eq__(self, other: object) -> bool:
        """NaN is the same value as NaN here."""
        return isinstance(other, Pattern) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def width(dtype: torch.dtype) -> int:
    """Bits of one number."""
    return 8 * dtype.itemsize


def integers(numbers: Tensor) -> Tensor:
    """`numbers` as signed integers of the same size and shape, over the same memory.

    Raises:
        GuardError: When they are not real floating-point numbers.
    """
    if not numbers.is_floating_point():
        raise GuardError(f"faults go into floating-point numbers, not into {numbers.dtype}")
    # Unlike detach, data has a version counter of its own.
    return bits_of(numbers.data)


def flip(numbers: Tensor, bits: tuple[int, ...]) -> None:
    """Invert these bits of every number in place; done twice, it does nothing."""
    total = width(numbers.dtype)
    mask = sum(1 << bit for bit in set(bits))
    integers(numbers).bitwise_xor_(mask - (1 << total) if mask >> (total - 1) else mask)


def carry(numbers: Tensor, bit: int, sign: int) -> None:
    """Add `sign` 2^bit to the integer of every magnitude in place, at most to its ends."""
    whole = integers(numbers)
    largest = (1 << (width(numbers.dtype) - 1)) - 1
    magnitudes = whole & largest
    room = largest - magnitudes if sign > 0 else magnitudes
    # Magnitude and sign are apart in these formats: the sign bit stays what it was.
    whole.add_(torch.clamp(room, max=1 << bit), alpha=sign)


def stick(numbers: Tensor, value: float) -> None:
    """Set every number in place."""
    numbers.data.fill_(value)


def before_cast(numbers: Tensor, pattern: Pattern, draw: random.Random) -> None:
    """Change the float32 values that 16-bit `numbers` were rounded from, and round again, in place.

    What rounding removed is not stored any more; it is drawn uniformly from what would have been
    rounded to the same number.

    Raises:
        GuardError: For numbers that are not 16 bits wide.
    """
    removed = _REMOVED_BITS.get(numbers.dtype)
    if removed is None:
        raise GuardError(
            f"cast=before needs bfloat16 or float16 numbers; these are {numbers.dtype}"
        )
    wide = numbers.data.float()
    half = 1 << (removed - 1)
    drawn = [draw.randrange(1 - half, half) for _ in range(wide.numel())]
    rests = torch.tensor(drawn, dtype=torch.int32, device=wide.device).view(wide.shape)
    whole = integers(wide)
    # Around zero the sign bit would change, and infinities would be rounded from nothing finite.
    rests = torch.where(wide == 0, rests.abs(), rests)
    whole.add_(torch.where(torch.isfinite(wide), rests, 0))
    change(wide, pattern)
    numbers.data.copy_(wide)


def change(numbers: Tensor, pattern: Pattern) -> None:
    """Apply a pattern's change, whose bits are known, to every number in place."""
    if pattern.change == "flip":
        flip(numbers, pattern.bits)
    elif pattern.change == "carry":
        carry(numbers, pattern.bits[0], pattern.sign)
    else:
        stick(numbers, pattern.value)


def settled(pattern: Pattern, dtype: torch.dtype, draw: random.Random) -> Pattern:
    """`pattern` with its bits drawn where they are open.

    Raises:
        GuardError: For a bit that numbers of this type do not have.
    """
    if pattern.change == "stuck":
        return pattern
    total = _WIDE_BITS if pattern.before_cast else width(dtype)
    # The sign stands apart from what a carry changes.
    usable = total - 1 if pattern.change == "carry" else total
    bits = pattern.bits or (draw.randrange(usable),)
    if max(bits) >= usable:
        where = "float32, before the cast," if pattern.before_cast else str(dtype)
        raise GuardError(
            f"bit = {max(bits)} cannot {pattern.change} in {where.removeprefix('torch.')}: bits 0 "
            f"to {usable - 1} can"
        )
    return replace(pattern, bits=bits)


def columns(pattern: Pattern, column: int, row_length: int) -> slice:
    """The columns of one row that a pattern around `column` changes."""
    if pattern.extent == "segment":
        # Lanes are aligned: the segment that holds the column.
        first = column // pattern.length * pattern.length
        return slice(first, min(first + pattern.length, row_length))
    if pattern.extent == "stride":
        return slice(column % pattern.length, row_length, pattern.length)
    return slice(column, column + 1)


def memory_of(numbers: Tensor) -> Tensor:
    """`numbers` without repetition: an expanded dimension, one number in memory, has length 1."""
    for dimension, step in enumerate(numbers.stride()):
        if step == 0 and numbers.shape[dimension] > 1:
            numbers = numbers.narrow(dimension, 0, 1)
    return numbers


def strike(row: Tensor, column: int, pattern: Pattern, draw: random.Random) -> None:
    """Let a pattern whose bits are known hit a row (columns,) in place.

    Raises:
        GuardError: When the row's type does not fit the pattern.
    """
    struck = row[columns(pattern, column, len(row))]
    if pattern.before_cast:
        before_cast(struck, pattern, draw)
    else:
        change(struck, pattern)


def relative_change(before: Tensor, after: Tensor) -> float:
    """|after - before| / |before| of two rows in 2-norms; infinity where it is not finite."""
    old, new = before.double(), after.double()
    norm, distance = float(old.norm()), float((new - old).norm())
    if distance == 0:
        return 0.0
    ratio = distance / norm if norm else math.inf
    return ratio if math.isfinite(ratio) else math.inf


Number = TypeVar("Number", int, float)
Duration = Literal["transient", "intermittent", "permanent"]
"""transient: once, and not in a recomputation; intermittent: at any use, with a probability;
permanent: at every use. The last two strike the same unit each time."""

ProcessKind = Literal["kill", "stop", "disk-full"]
"""kill: SIGKILL; stop: SIGSTOP for some seconds; disk-full: writes to files fail for some steps."""

_ANY_BIT = Pattern()
_COUNTS = ("step", "every", "occurrence", "position", "rank")
"""Whole numbers of a `Fault`."""
_DURATIONS: tuple[Duration, ...] = ("transient", "intermittent", "permanent")
PROCESS_KINDS: tuple[ProcessKind, ...] = ("kill", "stop", "disk-full")


@dataclass(frozen=True)
class Fault:
    """Wrong values at one site.

    Attributes:
        site: One of `outlast.guard.findings.SITES`.
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
        for name in _COUNTS:
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
        """Return whether the fault may strike in this step."""
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
        parts += _number_parts(self, _COUNTS)
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

    Of wrong values: one of ``bit=K|any``, ``bits=K+L``, ``carry=+K|-K|any``, ``stuck=VALUE``,
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
    duration = _one_of(pairs, _DURATIONS)
    if duration is not None:
        values["duration"] = duration[0]
        if duration[0] == "intermittent":
            values["probability"] = _read(*duration, float)
        elif duration[1]:
            raise GuardError(f"{duration[0]} takes no value, not {duration[1]!r}")
    for key in _COUNTS:
        if key in pairs:
            values[key] = _read(key, pairs.pop(key), int)
    if pairs:
        names = (*_CHANGES, "segment", "stride", "cast", *_DURATIONS, "module", *_COUNTS)
        raise GuardError(_unknown("key of wrong values", next(iter(pairs)), names))
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


class ProcessFaults:
    """Executes the process faults of one rank.

    Args:
        faults: Those of other ranks, and wrong values, are left out.
        rank: This process.
        marks: Folder that outlives the process; what has happened is noted there first, so that a
            process that comes back to the step does not meet it again. None: it would.

    Attributes:
        happened: The faults of this process so far.
    """

    def __init__(
        self, faults: Iterable[Fault | ProcessFault], *, rank: int = 0, marks: Path | None = None
    ) -> None:
        self.happened: list[ProcessFault] = []
        self._faults = [
            (number, fault)
            for number, fault in enumerate(faults)
            if isinstance(fault, ProcessFault) and fault.rank == rank
        ]
        self._marks = marks
        self._full_until: int | None = None
        self._limit = resource.RLIM_INFINITY

    def at(self, step: int) -> None:
        """Let happen what is due before `step`; to be called once before every step.

        A killed process does not return from this; a stopped one later.
        """
        if self._full_until is not None and step >= self._full_until:
            self.end()
        for number, fault in self._faults:
            if fault.step == step and self._first_time(number):
                self.happened.append(fault)
                if fault.kind == "kill":
                    kill()
                elif fault.kind == "stop":
                    stop(fault.seconds)
                else:
                    self.end()
                    self._limit = fill_disk(fault.room_bytes)
                    self._full_until = fault.step + fault.steps

    def end(self) -> None:
        """Give the disk its room back, if it is full."""
        if self._full_until is not None:
            self._full_until = None
            free_disk(self._limit)

    def _first_time(self, number: int) -> bool:
        if self._marks is None:
            return True
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            (self._marks / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def kill() -> None:
    """End this process as the kernel ends one without memory, or a node without power."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """Stop all threads of this process for so many seconds, as a frozen node would be."""
    process = os.getpid()
    # A shell of its own wakes the process up, twice in case the first call comes before the stop.
    wake = f"sleep {seconds:.3f}; kill -CONT {process}; sleep 1; kill -CONT {process}"
    subprocess.run(
        ["/bin/sh", "-c", f"({wake}) >/dev/null 2>&1 &"], check=True, start_new_session=True
    )
    os.kill(process, signal.SIGSTOP)


def fill_disk(room_bytes: int = 0) -> int:
    """Let writes of this process fail wherever a file would grow beyond so many bytes.

    By the soft limit RLIMIT_FSIZE, which needs no rights. Writes fail with EFBIG where a full disk
    gives ENOSPC; pipes, sockets, devices and processes started before are not concerned, and a
    limit of 0 also refuses to overwrite what a full disk would still hold.

    Returns:
        The limit before, for `free_disk`.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ from its start, so that the write fails and the process continues.
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    return before


def free_disk(limit: int) -> None:
    """Undo `fill_disk`, which gave the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


_TILE_ROWS = 128
"""A unit that fails again and again sits in the first rows, so that the recomputation of a tile,
which begins at a multiple of this, uses it for the same numbers."""

# Sites whose names are not those of modules in the ledger, and names that are another check's.
_UNNAMED = ("optimizer.", "weight.", "bucket.", "gather.")
_NAMED_BY = {"weight": "linear."}


@dataclass(frozen=True)
class Injection:
    """Numbers that were changed on purpose.

    Attributes:
        fault: Which of the injector's faults, from 0.
        step: Optimizer steps done before.
        attempt: Attempts at this step before.
        site: As in `outlast.guard.findings.SITES`.
        module: The name given at the site.
        occurrence: Uses of the site by the module in this attempt before.
        index: Of the first number changed: row-major in the tensor's shape, where dimensions that
            an expansion repeats count 1.
        elements: How many numbers the pattern covers.
        bits: Those flipped, or the k of a carry; empty for stuck values.
        before: The number at `index` before.
        after: The same after.
        changed: Whether any bit is different now.
        relative: 2-norm of the change as a share of the 2-norm of its row, the last dimension.
    """

    fault: int
    step: int
    attempt: int
    site: str
    module: str
    occurrence: int
    index: int
    elements: int
    bits: tuple[int, ...]
    before: float
    after: float
    changed: bool
    relative: float


class Injector:
    """A `outlast.guard.findings.FaultHook` that injects faults.

    Args:
        faults: Wrong values; those of other ranks are left out.
        seed: Of all choices.
        rank: This process.
        modules: (site, module) pairs that exist. A fault strikes one that it matches, chosen by
            the seed. Of a site without any pair, the names that earlier steps have used are the
            choice, and in the first step the first that is used is struck.
        clock: Gives the step; without it `begin` must tell.

    Attributes:
        injections: What was done so far.
    """

    def __init__(
        self,
        faults: Iterable[Fault | ProcessFault],
        *,
        seed: int = 0,
        rank: int = 0,
        modules: Collection[tuple[str, str]] = (),
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.injections: list[Injection] = []
        self._faults = [
            (number, fault)
            for number, fault in enumerate(faults)
            if isinstance(fault, Fault) and fault.rank == rank
        ]
        self._seed = seed
        self._given = set(modules)
        self._learned: set[tuple[str, str]] = set()
        self._clock = clock
        self._step = self._attempt = 0
        self._uses: Counter[tuple[str, str]] = Counter()
        self._fired: set[tuple[int, int]] = set()
        self._units: dict[int, str] = {}

    @property
    def modules(self) -> set[tuple[str, str]]:
        """The (site, module) pairs known now; another injector with them chooses the same."""
        sites = {site for site, _ in self._given}
        return self._given | {pair for pair in self._learned if pair[0] not in sites}

    @property
    def idle(self) -> tuple[Fault, ...]:
        """Faults of this process that have not struck: no such site was used at their time."""
        struck = {injection.fault for injection in self.injections}
        return tuple(fault for number, fault in self._faults if number not in struck)

    def begin(self, step: int, attempt: int = 0) -> None:
        """Tell which attempt at which step begins; uses are counted from 0 again."""
        self._step, self._attempt = step, attempt
        self._learned.update(self._uses)
        self._uses.clear()

    def __call__(self, site: str, module: str, numbers: Tensor) -> None:
        """Inject what is due here; see `outlast.guard.findings.FaultHook`.

        Raises:
            GuardError: For a position or a bit that `numbers` do not have.
        """
        if self._clock is not None and (step := self._clock()) != self._step:
            self.begin(step)
        occurrence = self._uses[site, module]
        self._uses[site, module] += 1
        for number, fault in self._faults:
            if fault.site == site and fault.due(self._step):
                self._consider(number, fault, module, occurrence, numbers)

    def _consider(
        self, number: int, fault: Fault, module: str, occurrence: int, numbers: Tensor
    ) -> None:
        if not self._chooses(number, fault, module):
            return
        if fault.duration == "transient":
            if (number, self._step) in self._fired or occurrence != fault.occurrence:
                return
            self._fired.add((number, self._step))
        elif fault.duration == "intermittent":
            draw = self._draw(number, "shows", self._step, self._attempt, module, occurrence)
            if draw.random() >= fault.probability:
                return
        if numbers.numel():
            self._inject(number, fault, module, occurrence, numbers)

    def _inject(
        self, number: int, fault: Fault, module: str, occurrence: int, numbers: Tensor
    ) -> None:
        local = numbers.to_local() if is_dtensor(numbers) else numbers
        memory = memory_of(local).data
        row_length = memory.shape[-1] if memory.dim() else 1
        index = self._index(number, fault, memory.numel() // row_length, row_length)
        row_index, column = divmod(index, row_length)
        if memory.dim() > 1:
            place = torch.unravel_index(torch.tensor(row_index), memory.shape[:-1])
            row = memory[tuple(int(name) for name in place)]
        else:
            row = memory.view(-1)
        before = row.clone()
        draw = self._draw(number, "bits", *self._when(fault))
        try:
            pattern = settled(fault.pattern, row.dtype, draw)
            strike(row, column, pattern, draw)
        except GuardError as error:
            raise GuardError(f"fault {str(fault)!r} in {module}: {error}") from None
        struck = range(row_length)[columns(pattern, column, row_length)]
        self.injections.append(
            Injection(
                fault=number,
                step=self._step,
                attempt=self._attempt,
                site=fault.site,
                module=module,
                occurrence=occurrence,
                index=row_index * row_length + struck[0],
                elements=len(struck),
                bits=pattern.bits if pattern.change != "stuck" else (),
                before=float(before[struck[0]]),
                after=float(row[struck[0]]),
                changed=not torch.equal(integers(row), integers(before)),
                relative=relative_change(before, row),
            )
        )

    def _chooses(self, number: int, fault: Fault, module: str) -> bool:
        """Return whether this module is the one that the fault strikes in this step."""
        if not fnmatch.fnmatchcase(module, fault.module):
            return False
        known = sorted(
            name
            for site, name in self.modules
            if site == fault.site and fnmatch.fnmatchcase(name, fault.module)
        )
        chosen = module
        if known:
            chosen = self._draw(number, "module", *self._when(fault)).choice(known)
        if fault.duration != "transient":
            chosen = self._units.setdefault(number, chosen)
        return module == chosen

    def _index(self, number: int, fault: Fault, rows: int, row_length: int) -> int:
        if fault.position is not None and fault.duration == "transient":
            if fault.position >= rows * row_length:
                raise GuardError(
                    f"fault {str(fault)!r}: there are only {rows * row_length} numbers at "
                    f"{fault.site}; position counts them from 0"
                )
            return fault.position
        draw = self._draw(number, "position", *self._when(fault))
        if fault.duration == "transient":
            return draw.randrange(rows * row_length)
        if fault.position is not None:
            row, column = divmod(fault.position, row_length)
            # Where fewer rows are computed they are those of a tile.
            row = row if row < rows else row % _TILE_ROWS
        else:
            # Of draws, not of sizes: the same unit whatever is computed.
            row, column = draw.randrange(_TILE_ROWS), draw.randrange(1 << 30)
        return row % rows * row_length + column % row_length

    def _when(self, fault: Fault) -> tuple[int, ...]:
        """Return the steps that a fault's place depends on: none for a defective unit."""
        return (self._step,) if fault.duration == "transient" else ()

    def _draw(self, number: int, *purpose: object) -> random.Random:
        return random.Random(repr((self._seed, number, *purpose)))


def inject(
    guard: Guard, faults: Iterable[Fault | ProcessFault], *, seed: int = 0, rank: int = 0
) -> Injector:
    """Put faults into the run of a guarded model from now on.

    ``guard.watch.fault_hook = None`` ends it.

    Args:
        guard: Of the model.
        faults: See `outlast.guard.inject.parse_faults`; process faults are left out.
        seed: Of all choices.
        rank: This process.

    Raises:
        GuardError: For a fault whose module pattern matches no module with such a site.
    """
    watch, faults = guard.watch, tuple(faults)
    modules: set[tuple[str, str]] = set()
    for fault in faults:
        if not isinstance(fault, Fault) or fault.rank != rank:
            continue
        checks = _NAMED_BY.get(fault.site, fault.site.split(".", maxsplit=1)[0] + ".")
        # Operations without a module are named at their first use.
        own = {name for name, operation in watch.ledger.sites if operation.startswith(checks)}
        own.discard(ANYWHERE)
        if fault.site.startswith(_UNNAMED):
            own.clear()
        if own and not fnmatch.filter(own, fault.module):
            raise GuardError(
                f"fault {str(fault)!r}: module = {fault.module} matches none of the {len(own)} "
                f"guarded modules with {fault.site}, such as {min(own)}"
            )
        modules.update((fault.site, name) for name in own)
    injector = Injector(faults, seed=seed, rank=rank, modules=modules, clock=lambda: watch.step)
    watch.fault_hook = injector
    return injector
