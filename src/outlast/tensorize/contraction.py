"""Contraction of a layer's cores, worked out once: orders, products, permutations. No torch.

`steps` orders the contraction of small tensors, `merging` makes matrix products of it, and
`execution_plan` lists all that is done along a route. Between two of its stages, tensors have the
dimensions (b, t f, m) in the token-major layout and (b, m, f t) in the other, where t are the
tokens of a chunk; there is no b where it is one. A `LayerPlan` holds the routes of a layer.
"""

from __future__ import annotations

import functools
import math
import string
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outlast.extras import require
from outlast.tensorize.network import lower

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from outlast.tensorize.network import Network, Route, RouteStage


# In the letters of a network; stands for the tokens.
TOKENS = "."

Groups = tuple[str, ...]


@dataclass(frozen=True)
class Permutation:
    """A reordering of a tensor; None stands for none at all.

    Attributes:
        given: The tensor's dimensions, each the letters of some indices.
        wanted: The dimensions that it shall have.
        sizes: Its indices as dimensions, to permute them; empty: it has these dimensions.
        order: Of the indices; empty: they stay in their order.
        shape: The sizes of the wanted dimensions; empty: those of the indices.
    """

    given: Groups
    wanted: Groups
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor with the wanted dimensions; a view of it where that can be."""
        if self.sizes:
            tensor = tensor.reshape(self.sizes)
        if self.order:
            tensor = tensor.permute(self.order)
        return tensor.reshape(self.shape) if self.shape else tensor


def permutation(given: Groups, wanted: Groups, sizes: Mapping[str, int]) -> Permutation | None:
    """The reordering of the same indices from some dimensions into others.

    Indices of size one are nowhere in memory, so their places do not matter.

    Args:
        given: The dimensions of the tensor.
        wanted: Those that it shall have.
        sizes: Of every index but that of the tokens.
    """

    def size(group: str) -> int:
        return -1 if TOKENS in group else math.prod(sizes[letter] for letter in group)

    def long(group: str) -> str:
        return "".join(letter for letter in group if letter == TOKENS or sizes[letter] > 1)

    given, wanted = tuple(map(long, given)), tuple(map(long, wanted))
    if given == wanted:
        return None
    shape = tuple(map(size, wanted))
    before, after = "".join(given), "".join(wanted)
    if before == after:
        return Permutation(given, wanted, (), (), shape)
    split = () if given == tuple(before) else tuple(map(size, before))
    order = tuple(before.index(letter) for letter in after)
    return Permutation(given, wanted, split, order, () if wanted == tuple(after) else shape)


@dataclass(frozen=True)
class ContractionStep:
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
) -> tuple[ContractionStep, ...]:
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
        require("tensorize", "a layer of several cores", "opt_einsum")
        import opt_einsum

        _, info = opt_einsum.contract_path(
            ",".join(terms) + "->" + result, *shapes, shapes=True, optimize=how
        )
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
        # An equation whose alphabet is the order of the operands' indices.
        own = dict.fromkeys("".join(operands))
        names = dict(zip(own, string.ascii_letters[26:] + string.ascii_letters[:26], strict=False))
        renamed = ["".join(names[letter] for letter in term) for term in (*operands, letters)]
        if turned:
            # The other operand is taken first, so that the place after it moves down by one.
            places = places[1], places[0] - 1
        equation = ",".join(renamed[:-1]) + "->" + renamed[-1]
        found.append(ContractionStep(places, equation, letters))
        left.append(letters)
    return tuple(found)


def _entries(term: str, size: dict[str, int]) -> int:
    return math.prod(size[letter] for letter in term)


def _natural(operands: list[str], letters: str) -> str:
    """The order in which a product gives its result: shared, rows, columns."""
    first, second = operands
    shared = [letter for letter in first if letter in second and letter in letters]
    rows = [letter for letter in first if letter not in second and letter in letters]
    columns = [letter for letter in second if letter not in first and letter in letters]
    return "".join((*shared, *rows, *columns))


@dataclass(frozen=True)
class MatrixProduct:
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

    left: Permutation | None
    right: Permutation | None
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


def product(left: Groups, right: Groups, wanted: str, sizes: Mapping[str, int]) -> MatrixProduct:
    """The product of two tensors with these dimensions that leaves the wanted indices."""
    first, second = "".join(left), "".join(right)
    shared = "".join(item for item in first if item in second and item in wanted)
    summed = "".join(item for item in first if item in second and item not in wanted)
    rows = "".join(item for item in first if item not in second)
    columns = "".join(item for item in second if item not in first)

    def size(letters: str) -> int:
        return math.prod(sizes[letter] for letter in letters)

    batch = (shared,) if size(shared) > 1 else ()
    return MatrixProduct(
        permutation(left, (*batch, rows, summed), sizes),
        permutation(right, (*batch, summed, columns), sizes),
        (*batch, rows, columns),
        size(shared),
        size(rows),
        size(columns),
        size(summed),
        _lies(first, rows) + _lies(second, summed),
    )


def _lies(letters: str, slow: str) -> str:
    """Say if a matrix whose slower dimension has the indices `slow` lies transposed ("t")."""
    return "t" if letters and letters[-1] in slow else "n"


@dataclass(frozen=True)
class PairProduct:
    """A product of two tensors that are numbered: first the cores, then what is made of them.

    Attributes:
        result: Number of what it makes; in the backward pass of the tensor whose gradient it makes.
        first: Number of one factor; in the backward pass one that is marked by `of` is a gradient.
        second: That of the other.
        product: How.
        of: In the way back: which of the two factors is a gradient, 0 or 1.
        cores: The cores that are in the result.
    """

    result: int
    first: int
    second: int
    product: MatrixProduct
    of: int
    cores: frozenset[int]


@dataclass(frozen=True)
class Merging:
    """Contraction of a stage's cores to its matrix, and of its gradient to theirs.

    Attributes:
        cores: By their places in the network; they have the numbers 0, 1, ...
        ahead: Products that make the matrix.
        last: From what the last of them gives to (b, m, k), or (m, k) where b is one.
        back: Products that make gradients.
        closing: From the gradient of every core as the backward pass gives it to the core's shape.
        matrix: The dimensions of the matrix.
        padding: Columns and rows that the matrix has more than is used.
    """

    cores: tuple[int, ...]
    ahead: tuple[PairProduct, ...]
    last: Permutation | None
    back: tuple[PairProduct, ...]
    closing: tuple[Permutation | None, ...]
    matrix: Groups
    padding: tuple[int, int]

    def back_to(self, wanted: frozenset[int]) -> tuple[PairProduct, ...]:
        """The products that the gradients of some cores need."""
        return tuple(making for making in self.back if not making.cores.isdisjoint(wanted))


@functools.lru_cache(maxsize=16384)
def merging(network: Network, stage: RouteStage) -> Merging:
    """The merging of a stage."""
    sizes = dict(network.sizes)
    groups: list[Groups] = [tuple(network.cores[core]) for core in stage.cores]
    within = [frozenset((core,)) for core in stage.cores]
    matrix: Groups = (stage.new, stage.contracted)
    if stage.b > 1:
        matrix = (stage.batch, *matrix)
    left = list(range(len(groups)))
    ahead: list[PairProduct] = []
    terms = tuple("".join(group) for group in groups)
    order = steps(terms, stage.batch + stage.new + stage.contracted, network.sizes)
    for step in order if len(terms) > 1 else ():
        first, second = (left.pop(place) for place in step.places)
        found = product(groups[first], groups[second], step.result, sizes)
        left.append(len(groups))
        covered = within[first] | within[second]
        ahead.append(PairProduct(len(groups), first, second, found, 0, covered))
        groups.append(found.gives)
        within.append(covered)
    gradients: dict[int, Groups] = {len(groups) - 1: matrix}
    back: list[PairProduct] = []
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
            back.append(PairProduct(part, *factors, found, of, within[part]))
            gradients[part] = found.gives
    return Merging(
        stage.cores,
        tuple(ahead),
        permutation(groups[-1], matrix, sizes),
        tuple(back),
        tuple(
            permutation(gradients[number], tuple(network.cores[core]), sizes)
            for number, core in enumerate(stage.cores)
        ),
        matrix,
        (network.size(stage.contracted) - stage.k, network.size(stage.new) - stage.m),
    )


@dataclass(frozen=True)
class PlannedStage:
    """One stage on the way.

    Attributes:
        stage: Which.
        merging: How its matrix is made.
        enter: From what the stage before gives, or x, to what this one takes.
        back: From the gradient of what it takes to that of what the stage before gives, or of x.
    """

    stage: RouteStage
    merging: Merging
    enter: Permutation | None
    back: Permutation | None


@dataclass(frozen=True)
class ExecutionPlan:
    """A route in all detail.

    Attributes:
        stages: Its stages.
        features: Whether the layout is feature-major.
        leave: From what the last stage gives to y.
        leave_back: From the gradient of y to that of what the last stage gives.
        width: Features of x, with the padding if the first stage needs it.
        out_width: Likewise of y.
        narrow: Whether nothing between the stages is wider than half of x.
    """

    stages: tuple[PlannedStage, ...]
    features: bool
    leave: Permutation | None
    leave_back: Permutation | None
    width: int
    out_width: int
    narrow: bool


@functools.lru_cache(maxsize=16384)
def execution_plan(network: Network, route: Route) -> ExecutionPlan:
    """Everything that is done along a route."""
    lowered = lower(network, route)
    stages, sizes = lowered.stages, dict(network.sizes)
    features = route.layout == "features"
    given = _ends(network.inputs, features)
    planned_stages = []
    for stage in stages:
        batch = (stage.batch,) if stage.b > 1 else ()
        if features:
            taken: Groups = (*batch, stage.contracted, stage.free + TOKENS)
            gives: Groups = (*batch, stage.new, stage.free + TOKENS)
        else:
            taken = (*batch, TOKENS + stage.free, stage.contracted)
            gives = (*batch, TOKENS + stage.free, stage.new)
        enter, back = permutation(given, taken, sizes), permutation(taken, given, sizes)
        planned_stages.append(PlannedStage(stage, merging(network, stage), enter, back))
        given = gives
    outputs = _ends(network.outputs, features)
    return ExecutionPlan(
        tuple(planned_stages),
        features,
        permutation(given, outputs, sizes),
        permutation(outputs, given, sizes),
        stages[0].width,
        stages[-1].out_width,
        all(2 * stage.width <= network.in_features for stage in stages[1:]),
    )


def _ends(letters: str, features: bool) -> Groups:
    return (letters, TOKENS) if features else (TOKENS, letters)


def keeps(network: Network, plan: LayerPlan, tokens: int) -> bool:
    """Return whether the stages' inputs are kept for the backward pass, not recomputed.

    They are where they are narrow, all tokens go at once, and some core's gradient uses them.
    """
    if 0 < plan.forward.chunk < tokens or plan.forward not in plan.core_gradients:
        return False
    return execution_plan(network, replace(plan.forward, chunk=0)).narrow


@dataclass(frozen=True)
class LayerPlan:
    """The routes of a layer.

    Attributes:
        forward: That of y.
        input_gradient: That of the gradient of x.
        core_gradients: That of every core's gradient, in the order of the network's cores.
        plain: Leave differentiation to autograd, which keeps what is between the stages: cheapest
            where the tokens are so few that starting operations is what takes the time.
        fused: Take the Triton kernels of `outlast.tensorize.kernels` instead of the routes, which
            only tensors go that no kernel reads. On CUDA devices alone, and not yet run on one.
        seconds: Time of forward and backward; of forward alone without gradients.
        dense_seconds: Likewise of the dense layer.
        timed: Whether both were timed; predicted otherwise.
        reason: Why this plan, in words.
    """

    forward: Route
    input_gradient: Route
    core_gradients: tuple[Route, ...]
    plain: bool = False
    fused: bool = False
    seconds: float = field(default=0.0, compare=False)
    dense_seconds: float = field(default=0.0, compare=False)
    timed: bool = field(default=False, compare=False)
    reason: str = field(default="", compare=False)

    @staticmethod
    def uniform(route: Route, cores: int, *, plain: bool = False) -> LayerPlan:
        """The same route for everything."""
        return LayerPlan(route, route, (route,) * cores, plain)
