"""A fault_hook that puts faults into a run, at places that depend on the seed alone.

Every choice (module, element, bits, whether an intermittent fault shows) is a function of the seed,
the fault, the step, the attempt and the number of the use, so a drill repeats itself exactly, and a
run without protection meets the same faults as a protected one.
"""

from __future__ import annotations

import fnmatch
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from outlast.errors import GuardError
from outlast.guard.inject.fault import (
    Fault,
    columns,
    integers,
    memory_of,
    relative_change,
    settled,
    strike,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor

    from outlast.guard.handle import Guard
    from outlast.guard.inject.fault import ProcessFault

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
        faults: Wrong numbers; those of other ranks are left out.
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
        local = numbers.to_local() if isinstance(numbers, DTensor) else numbers
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
        own = {name for name, operation in watch.ledger.sites if operation.startswith(checks)}
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
