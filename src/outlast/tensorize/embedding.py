"""Embedding tables made of factors, and the output layers that are tied to them.

Rows of a table that is made of cores: the cores of each half of the row's index are merged once.

A row number i = i1 V2 + i2 picks a slice of what the first cores make of the V1 values of i1 and
one of what the others make of the V2 values of i2; the row is the product of the two. Both halves
have about sqrt(V) slices, so merging them costs little, and the cores never meet a vector as long
as the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.execute import autocasts, contract, has_values, transformed, without_autocast
from outlast.tensorize.initialize import initialize_
from outlast.tensorize.layer import Factory, StructuredLayer, dense_matrix, weight_of
from outlast.tensorize.network import (
    Network,
    chosen_modes,
    one_rank,
    train_matrix_network,
    train_network,
)
from outlast.tensorize.operator import chain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from outlast.tensorize.network import Ranks


@dataclass(frozen=True)
class TablePart:
    """Cores that are merged, and the indices of what they make.

    Attributes:
        terms: The letters of each core.
        cores: Their places in the network.
        rows: Letters of the row's index, which come first.
        rest: The other letters of the merged cores.
        count: The product of the sizes of `rows`.
        shape: The sizes of `rest`.
    """

    terms: tuple[str, ...]
    cores: tuple[int, ...]
    rows: str
    rest: str
    count: int
    shape: tuple[int, ...]

    def merged(self, cores: Sequence[Tensor], network: Network) -> Tensor:
        """Product of the part's cores, with the rows first."""
        own, wanted = [cores[core] for core in self.cores], self.rows + self.rest
        if torch.compiler.is_compiling():
            # The search for a path cannot be traced, and torch.einsum has its own.
            return torch.einsum(",".join(self.terms) + "->" + wanted, *own)
        if len(own) == 1:
            return own[0].permute([self.terms[0].index(letter) for letter in wanted])
        return contract(self.terms, wanted, network.sizes, own)


@dataclass(frozen=True)
class TableHalves:
    """A network cut for looking up rows.

    Attributes:
        network: The map from rows to columns.
        parts: The halves, one where there is a single core with rows, and what has no rows.
        products: The einsum equation that adds each part after the first.
        shape: (rows of padding and all, columns of padding and all).
    """

    network: Network
    parts: tuple[TablePart, ...]
    products: tuple[str, ...]
    shape: tuple[int, int]


def halves(network: Network) -> TableHalves:
    """Cut a chain whose cores have the modes of the row in order, and all of them before the last.

    The cut is where the merged halves are smallest.
    """
    ends = [core for core, term in enumerate(network.cores) if set(term) & set(network.inputs)]
    last = ends[-1] + 1
    cuts = [_parts(network, (0, cut, last, len(network.cores))) for cut in range(1, last)]
    cuts = cuts or [_parts(network, (0, last, len(network.cores)))]
    parts = min(cuts, key=lambda cut: sum(network.size(part.rows + part.rest) for part in cut))
    products = []
    have = parts[0].rest
    for place, part in enumerate(parts[1:], start=1):
        later = "".join(after.rest for after in parts[place + 1 :]) + network.outputs
        both = dict.fromkeys(have + part.rest)
        wanted = "".join(letter for letter in both if letter in later)
        wanted = network.outputs if place == len(parts) - 1 else wanted
        of_row = "..." if part.rows else ""
        products.append(f"...{have},{of_row}{part.rest}->...{wanted}")
        have = wanted
    shape = network.size(network.inputs), network.size(network.outputs)
    return TableHalves(network, parts, tuple(products), shape)


def _parts(network: Network, bounds: tuple[int, ...]) -> tuple[TablePart, ...]:
    parts = []
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        terms = network.cores[begin:end]
        others = "".join(network.cores[:begin] + network.cores[end:]) + network.outputs
        own = dict.fromkeys("".join(terms))
        rows = "".join(letter for letter in network.inputs if letter in own)
        rest = "".join(letter for letter in own if letter in others and letter not in rows)
        if len(terms) == len(network.cores):
            rest = network.outputs
        shape = tuple(network.size(letter) for letter in rest)
        parts.append(
            TablePart(terms, tuple(range(begin, end)), rows, rest, network.size(rows), shape)
        )
    return tuple(parts)


def look_up(index: Tensor, cores: Sequence[Tensor], halved: TableHalves) -> Tensor:
    """Rows of a table; keeps the indices and the cores alone for the backward pass.

    Args:
        index: (n,) row numbers.
        cores: The cores of the network.
        halved: The network.

    Returns:
        (n, columns)
    """
    plain = torch.compiler.is_compiling() or transformed()
    if autocasts(index.device):
        # An nn.Embedding gives its own dtype under autocast as well.
        with torch.autocast(index.device.type, enabled=False):
            return look_up(index, cores, halved)
    if plain or index.is_meta:
        return _rows(index, cores, halved)
    rows: Tensor = _LookUp.apply(index, halved, *cores)  # type: ignore[no-untyped-call]
    return rows


def _rows(index: Tensor, cores: Sequence[Tensor], halved: TableHalves) -> Tensor:
    rows, left = None, index
    stride = halved.shape[0]
    products = iter(halved.products)
    for part in halved.parts:
        merged = part.merged(cores, halved.network)
        if part.rows:
            stride //= part.count
            place = torch.div(left, stride, rounding_mode="floor")
            left = left - place * stride
            merged = functional.embedding(place, merged.reshape(part.count, -1))
            merged = merged.view(-1, *part.shape)
        rows = merged if rows is None else torch.einsum(next(products), rows, merged)
    assert rows is not None
    return rows.reshape(-1, halved.shape[1])[:, : halved.network.out_features]


class _LookUp(Function):
    """See `look_up`."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, halved: TableHalves, *cores: Tensor) -> Tensor:
        ctx.halved = halved
        ctx.save_for_backward(index, *cores)
        return _rows(index, cores, halved).contiguous()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, *cores = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that a core that is used twice does not count twice.
            cores = [
                core.view_as(core) if again else core.detach().requires_grad_() for core in cores
            ]
            rows = _rows(index, cores, ctx.halved)
        needs = ctx.needs_input_grad[2:]
        wanted = [core for core, need in zip(cores, needs, strict=True) if need]
        found = iter(torch.autograd.grad(rows, wanted, gradients, create_graph=again))
        return None, None, *(next(found) if need else None for need in needs)


# From this many indices on, rows are made once per different index.
_MANY = 64


class StructuredEmbedding(StructuredLayer):
    """An embedding whose table is made of factors; the base of the forms.

    Takes the place of an `nn.Embedding`: indices of any shape, `padding_idx`. It has no
    ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.

    Attributes:
        num_embeddings: Rows of the table.
        embedding_dim: Its columns.
        padding_idx: The row that is and stays zero.
        network: How the factors make the table: a map from its rows to its columns.
    """

    def __init__(self, network: Network, padding_idx: int | None) -> None:
        super().__init__(network)
        rows = network.in_features
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise TensorizeError(f"padding_idx = {padding_idx} is no row of the {rows}")
        self.num_embeddings = rows
        self.embedding_dim = network.out_features
        self.padding_idx = None if padding_idx is None else padding_idx % rows

    def forward(self, index: Tensor) -> Tensor:
        """Rows of the table; index: (...) of integers -> (..., embedding_dim).

        Raises:
            IndexError: An index is no row; seen on the CPU alone, outside compiled code.
        """
        flat = index.reshape(-1)
        eager = not torch.compiler.is_compiling()
        eager = eager and not transformed() and has_values(index)
        if index.device.type == "cpu" and eager and flat.numel():
            low, high = torch.aminmax(flat)
            if int(low) < 0 or int(high) >= self.num_embeddings:
                raise IndexError(
                    f"indices from {int(low)} to {int(high)} into {self.num_embeddings} embeddings"
                )
        if index.device.type == "cpu" and eager and flat.numel() >= _MANY:
            # Elsewhere this would wait for the device.
            different, places = torch.unique(flat, return_inverse=True)
            rows = functional.embedding(places, self._rows(different))
        else:
            rows = self._rows(flat)
        return rows.view(*index.shape, self.embedding_dim)

    def _raw_rows(self, index: Tensor) -> Tensor:
        """Rows of the table without regard to `padding_idx`; (n,) -> (n, embedding_dim)."""
        raise NotImplementedError

    def _rows(self, index: Tensor) -> Tensor:
        rows = self._raw_rows(index)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((index == self.padding_idx).unsqueeze(1), 0.0)

    def to_dense(self) -> Tensor:
        """The table, of shape (num_embeddings, embedding_dim); exact and differentiable."""
        table = dense_matrix(self.network, self.factors()).t()
        if self.padding_idx is None:
            return table
        rows = torch.arange(self.num_embeddings, device=table.device)
        return table.masked_fill((rows == self.padding_idx).unsqueeze(1), 0.0)

    @property
    def weight(self) -> Tensor:
        """The table of the `nn.Embedding` in whose place this is; see `StructuredLinear.weight`."""
        return weight_of(self, (self.num_embeddings, self.embedding_dim))

    @property
    def scoring(self) -> Network:
        """The network of the transposed table, a map from its columns to its rows."""
        net = self.network
        return Network(
            net.outputs, net.inputs, net.cores[::-1], net.sizes, net.out_features, net.in_features
        )

    def logits(self, x: Tensor) -> Tensor:
        """The product with every row, for an output layer that is tied to this one.

        Args:
            x: (..., embedding_dim).

        Returns:
            (..., num_embeddings)
        """
        scores = chain(x, self.factors()[::-1], self.scoring)
        if self.padding_idx is None:
            return scores
        columns = torch.arange(self.num_embeddings, device=x.device)
        return scores.masked_fill(columns == self.padding_idx, 0.0)

    @torch.no_grad()
    def reset_parameters(self, std: float = 1.0, generator: torch.Generator | None = None) -> None:
        """Draw the factors anew, all of one standard deviation.

        Args:
            std: Standard deviation of the table's entries; 1 is that of a new `nn.Embedding`.
            generator: Where the numbers come from; None: torch's own.
        """
        cores = self.factors()
        initialize_(cores, self.network, std, generator=generator)
        if std > 0.0 and has_values(cores[0]):
            # A row is no sum over the vocabulary, so no core has more terms than another.
            deviations = [float(core.square().mean().sqrt()) for core in cores]
            even = math.exp(sum(map(math.log, deviations)) / len(cores))
            for core, deviation in zip(cores, deviations, strict=True):
                core.mul_(even / deviation)

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer; ``type(layer)(**layer.settings())`` is another."""
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "rank": self.rank,
            "padding_idx": self.padding_idx,
        }

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        share = self.network.parameters / (self.num_embeddings * self.embedding_dim)
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}, {padding}"
            f"{share:.1%} of the dense parameters"
        )


class LowRankEmbedding(StructuredEmbedding):
    """A narrow table and a projection of its rows.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        rank: Columns of the narrow table.
        padding_idx: The row that is and stays zero.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "low_rank"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        *,
        padding_idx: int | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        one_rank(rank, "low_rank")
        sizes = (("i", num_embeddings), ("r", rank), ("o", embedding_dim))
        network = Network("i", "o", ("ir", "or"), sizes, num_embeddings, embedding_dim)
        super().__init__(network, padding_idx)
        self.table = nn.Embedding(num_embeddings, rank, **factory)
        self.up = nn.Linear(rank, embedding_dim, bias=False, **factory)
        self.reset_parameters()

    def factors(self) -> tuple[Tensor, ...]:
        """The weights of `table` and `up`."""
        return self.table.weight, self.up.weight

    def _raw_rows(self, index: Tensor) -> Tensor:
        rows: Tensor = self.up(self.table(index))
        return rows.to(self.table.weight.dtype)


class CoredEmbedding(StructuredEmbedding):
    """A form whose factors are the parameters ``cores.0``, ``cores.1`` and so on."""

    def __init__(
        self,
        network: Network,
        padding_idx: int | None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(network, padding_idx)
        self._halves = halves(network)
        self.cores = nn.ParameterList(
            torch.empty(network.shape(core), **factory) for core in range(len(network.cores))
        )
        self.reset_parameters()

    def factors(self) -> tuple[Tensor, ...]:
        """The cores."""
        return tuple(self.cores)

    def _raw_rows(self, index: Tensor) -> Tensor:
        if self._halves.network is not self.network:
            # The ranks were changed.
            self._halves = halves(self.network)
        return look_up(index, self.factors(), self._halves)

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        sizes = dict(self.network.sizes)
        return {
            **super().settings(),
            "row_modes": tuple(sizes[letter] for letter in self.network.inputs),
            "column_modes": tuple(sizes[letter] for letter in self.network.outputs),
        }


class EmbeddingSettings(Factory, total=False):
    """Settings of an embedding that is a chain of cores; see `_TrainEmbedding`."""

    row_modes: tuple[int, ...] | None
    column_modes: tuple[int, ...] | None
    padding_idx: int | None


class _TrainEmbedding(CoredEmbedding):
    """A chain of cores over factors of the rows and of the columns.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        rank: Size of all bonds, or of each of them.
        cores: Modes on each side, where they are not given.
        row_modes: Factors of the rows; None: as even as possible, with a few rows more.
        column_modes: Factors of the columns; None: as even as possible.
        padding_idx: The row that is and stays zero.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    build: ClassVar[Callable[..., Network]]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: Ranks,
        cores: int,
        *,
        row_modes: tuple[int, ...] | None = None,
        column_modes: tuple[int, ...] | None = None,
        padding_idx: int | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        into = chosen_modes(row_modes, num_embeddings, cores, name="cores")
        out = chosen_modes(column_modes, embedding_dim, cores, name="cores")
        network = self.build(num_embeddings, embedding_dim, rank, in_modes=into, out_modes=out)
        super().__init__(network, padding_idx, **factory)


class TTEmbedding(_TrainEmbedding):
    """Tensor train: the modes of the rows one after the other, then those of the columns.

    The rank between the two halves is the rank of the table. See `_TrainEmbedding` for the
    arguments.
    """

    form: ClassVar[str] = "tt"
    build = staticmethod(train_network)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: Ranks,
        cores: int = 3,
        **settings: Unpack[EmbeddingSettings],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, rank, cores, **settings)


class TTMEmbedding(_TrainEmbedding):
    """Tensor-train matrix: every core has a mode of the rows and one of the columns.

    See `_TrainEmbedding` for the arguments.
    """

    form: ClassVar[str] = "ttm"
    build = staticmethod(train_matrix_network)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: Ranks,
        cores: int = 4,
        **settings: Unpack[EmbeddingSettings],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, rank, cores, **settings)


class TiedHead(nn.Module):
    """Scores of every row of an embedding's table; has no factors of its own.

    The embedding is no child of it, so every parameter has one name in the model.

    Args:
        embedding: What it is tied to.
        bias: Whether there is a bias, one number per row.
        device: Where that lies.
        dtype: Its.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        embedding: StructuredEmbedding,
        *,
        bias: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.tie(embedding)
        empty = torch.empty(self.out_features, **factory) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, *others: Any
    ) -> None:
        # A dense weight that is loaded here is the embedding's, which refuses what it cannot take.
        state.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state, prefix, metadata, *others)

    @property
    def embedding(self) -> StructuredEmbedding:
        """The embedding that the head is tied to."""
        (embedding,) = self._tied
        return embedding

    def tie(self, embedding: StructuredEmbedding) -> None:
        """Take the factors of another embedding of the same sizes from now on."""
        self._tied = (embedding,)

    @property
    def weight(self) -> Tensor:
        """The embedding's table; see `StructuredLinear.weight`."""
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        scores = self.embedding.logits(x)
        return scores if self.bias is None else scores + self.bias.to(scores.dtype)

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        biased = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={biased}, tied to an embedding"


def tied_heads(model: nn.Module) -> dict[str, TiedHead]:
    """All such layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TiedHead)}


def name_of(module: nn.Module, model: nn.Module) -> str:
    """The first name of a module that is part of a model."""
    name: str = next(name for name, item in model.named_modules() if item is module)
    return name
