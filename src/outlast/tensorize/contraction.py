"""The order in which small tensors are contracted, and merging as matrix products. No torch."""

from __future__ import annotations

import functools
import math
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

import opt_einsum

from outlast.tensorize.turn import Groups, Turn, turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.tensorize.network import Network, Stage


@dataclass(frozen=True)
class Step:
    """One contraction of two tensors, or the reordering of one.

    Attributes:
        places: Those of the operands among the tensors that are left, in the order of the equation.
        equation: For einsum; its letters are the step's own.
        result: The result's indices, in the letters of the network.
    """

    places: tuple[int, ...]
    equation: str
    result: str


@functools.lru_cache(maxsize=16384)
def steps(
    terms: tuple[str, ...], result: str, sizes: tuple[tuple[str, int], ...]
) -> tuple[Step, ...]:
    """Pairwise contractions with the fewest operations, and without needless copies.

    torch.einsum makes a product of what it is given: rows of the first operand, columns of the
    second. With the larger one first, results between in the order in which that product gives
    them, and letters in the order of the first operand (for sums are taken in alphabetical order),
    the larger operand need not be copied; and a tall product is up to ten times as fast as a wide
    one with both factors transposed.

    Args:
        terms: Letters of every tensor's dimensions.
        result: Those of the result's.
        sizes: (letter, size) of every index.
    """
    size = dict(sizes)
    if len(terms) <= 2:
        order = [(tuple(range(len(terms)))[::-1], result)]
    else:
        shapes = [tuple(size[letter] for letter in term) for term in terms]
        how = "optimal" if len(terms) <= 4 else "dp"
        equation = ",".join(terms) + "->" + result
        _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=how)
        order = [(tuple(step[0]), step[2].split("->")[1]) for step in info.contraction_list]
    left = list(terms)
    found = []
    for number, (given, wanted) in enumerate(order):
        # Operands are taken out of a list one by one: the largest place first.
        places = tuple(sorted(given, reverse=True))
        taken = [left.pop(place) for place in places]
        turned = len(taken) == 2 and _entries(taken[1], size) > _entries(taken[0], size)
        operands = taken[::-1] if turned else taken
        letters = wanted if number == len(order) - 1 else _natural(operands, wanted)
        found.append(Step(_shifted(places, turned), _equation(operands, letters), letters))
        left.append(letters)
    return tuple(found)


def _entries(term: str, size: dict[str, int]) -> int:
    return math.prod(size[letter] for letter in term)


def _shifted(places: tuple[int, ...], turned: bool) -> tuple[int, ...]:
    """Places for taking operands one by one, the other one first if turned."""
    if not turned:
        return places
    high, low = places
    return low, high - 1


def _natural(operands: list[str], letters: str) -> str:
    """The order in which a product gives its result: shared, rows, columns."""
    first, second = operands
    shared = [letter for letter in first if letter in second and letter in letters]
    rows = [letter for letter in first if letter not in second and letter in letters]
    columns = [letter for letter in second if letter not in first and letter in letters]
    return "".join((*shared, *rows, *columns))


def _equation(operands: list[str], letters: str) -> str:
    """An equation whose alphabet is the order of the operands' indices."""
    own = dict.fromkeys("".join(operands))
    names = dict(zip(own, string.ascii_letters[26:] + string.ascii_letters[:26], strict=False))
    renamed = ["".join(names[letter] for letter in term) for term in (*operands, letters)]
    return ",".join(renamed[:-1]) + "->" + renamed[-1]


@dataclass(frozen=True)
class Product:
    """A contraction of two tensors as a product of matrices, or of a batch of them.

    Attributes:
        left: Makes the first tensor (batch, rows, sums).
        right: Makes the second one (batch, sums, columns).
        gives: The dimensions of the result; two of them if there is no batch.
        b: Size of the batch; `m`, `n`, `k`: rows, columns, terms of a sum.
        m: See `b`.
        n: See `b`.
        k: See `b`.
        layout: Which of the two matrices lie transposed: ``nn``, ``nt``, ``tn`` or ``tt``.
    """

    left: Turn | None
    right: Turn | None
    gives: Groups
    b: int
    m: int
    n: int
    k: int
    layout: str

    @property
    def flops(self) -> int:
        """Additions and multiplications."""
        return 2 * self.b * self.m * self.n * self.k


def product(left: Groups, right: Groups, wanted: str, sizes: Mapping[str, int]) -> Product:
    """The product of two tensors with these dimensions that leaves the wanted indices."""
    first, second = "".join(left), "".join(right)
    shared = "".join(item for item in first if item in second and item in wanted)
    summed = "".join(item for item in first if item in second and item not in wanted)
    rows = "".join(item for item in first if item not in second)
    columns = "".join(item for item in second if item not in first)

    def size(letters: str) -> int:
        return math.prod(sizes[letter] for letter in letters)

    batch = (shared,) if size(shared) > 1 else ()
    return Product(
        turn(left, (*batch, rows, summed), sizes),
        turn(right, (*batch, summed, columns), sizes),
        (*batch, rows, columns),
        size(shared),
        size(rows),
        size(columns),
        size(summed),
        _lies(first, rows) + _lies(second, summed),
    )


def _lies(letters: str, slow: str) -> str:
    """Whether a matrix lies transposed, whose slower dimension has some of a tensor's indices."""
    return "t" if letters and letters[-1] in slow else "n"


@dataclass(frozen=True)
class Making:
    """A product of two tensors that are numbered: first the cores, then what is made of them.

    Attributes:
        result: Number of what it makes; in the way back of the tensor whose gradient it makes.
        first: Number of one factor; in the way back one that is marked by `of` is a gradient.
        second: That of the other.
        product: How.
        of: In the way back: which of the two factors is a gradient, 0 or 1.
        cores: The cores that are in the result.
    """

    result: int
    first: int
    second: int
    product: Product
    of: int
    cores: frozenset[int]


@dataclass(frozen=True)
class Merging:
    """How the cores of a stage become its matrix, and its gradient theirs.

    Attributes:
        cores: By their places in the network; they have the numbers 0, 1, ...
        ahead: Products that make the matrix.
        last: From what the last of them gives to (b, m, k), or (m, k) where b is one.
        back: Products that make gradients.
        closing: From the gradient of every core as the way back gives it to the core's shape.
        matrix: The dimensions of the matrix.
        padding: Columns and rows that the matrix has more than is used.
    """

    cores: tuple[int, ...]
    ahead: tuple[Making, ...]
    last: Turn | None
    back: tuple[Making, ...]
    closing: tuple[Turn | None, ...]
    matrix: Groups
    padding: tuple[int, int]

    def back_to(self, wanted: frozenset[int]) -> tuple[Making, ...]:
        """The products that the gradients of some cores need."""
        return tuple(making for making in self.back if not making.cores.isdisjoint(wanted))


@functools.lru_cache(maxsize=16384)
def merging(network: Network, stage: Stage) -> Merging:
    """The merging of a stage."""
    sizes = dict(network.sizes)
    groups: list[Groups] = [tuple(network.cores[core]) for core in stage.cores]
    within = [frozenset((core,)) for core in stage.cores]
    matrix: Groups = (stage.new, stage.contracted)
    if stage.b > 1:
        matrix = (stage.batch, *matrix)
    left = list(range(len(groups)))
    ahead: list[Making] = []
    terms = tuple("".join(group) for group in groups)
    order = steps(terms, stage.batch + stage.new + stage.contracted, network.sizes)
    for step in order if len(terms) > 1 else ():
        first, second = (left.pop(place) for place in step.places)
        found = product(groups[first], groups[second], step.result, sizes)
        left.append(len(groups))
        covered = within[first] | within[second]
        ahead.append(Making(len(groups), first, second, found, 0, covered))
        groups.append(found.gives)
        within.append(covered)
    gradients: dict[int, Groups] = {len(groups) - 1: matrix}
    back: list[Making] = []
    for made in reversed(ahead):
        given = gradients[made.result]
        pairs = (made.first, made.second), (made.second, made.first)
        for part, other in pairs:
            wanted = "".join(groups[part])
            # The larger one first: see `steps`.
            if _entries("".join(given), sizes) >= _entries("".join(groups[other]), sizes):
                found, of = product(given, groups[other], wanted, sizes), 0
                factors = made.result, other
            else:
                found, of = product(groups[other], given, wanted, sizes), 1
                factors = other, made.result
            back.append(Making(part, *factors, found, of, within[part]))
            gradients[part] = found.gives
    return Merging(
        stage.cores,
        tuple(ahead),
        turn(groups[-1], matrix, sizes),
        tuple(back),
        tuple(
            turn(gradients[number], tuple(network.cores[core]), sizes)
            for number, core in enumerate(stage.cores)
        ),
        matrix,
        (network.size(stage.contracted) - stage.k, network.size(stage.new) - stage.m),
    )
