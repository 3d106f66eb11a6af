"""The order in which opt_einsum contracts a few small tensors."""

from __future__ import annotations

import functools
import math
import string
from dataclasses import dataclass

import opt_einsum


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
