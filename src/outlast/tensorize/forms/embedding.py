"""Embedding tables made of factors: two, a tensor train, or a tensor-train matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.forms.lookup import halves, look_up
from outlast.tensorize.initialize import initialize_
from outlast.tensorize.network import Network
from outlast.tensorize.networks import (
    chosen_modes,
    one_rank,
    train_matrix_network,
    train_network,
)
from outlast.tensorize.operator import chain
from outlast.tensorize.surroundings import has_values, transformed
from outlast.tensorize.weight import (
    accept_factors,
    dense_matrix,
    save_dense_weights_too,
    weight_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.tensorize.networks import Ranks

# From this many indices on, rows are made once per different index.
_MANY = 64


class StructuredEmbedding(nn.Module):
    """An embedding whose table is made of factors; the base of the forms.

    Takes the place of an `nn.Embedding`: indices of any shape, `padding_idx`. It has no
    ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.

    Attributes:
        form: The name that `tensorize` knows the form by.
        num_embeddings: Rows of the table.
        embedding_dim: Its columns.
        padding_idx: The row that is and stays zero.
        network: How the factors make the table: a map from its rows to its columns.
    """

    form: ClassVar[str]

    def __init__(self, network: Network, padding_idx: int | None) -> None:
        super().__init__()
        rows = network.in_features
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise TensorizeError(f"padding_idx = {padding_idx} is no row of the {rows}")
        self.network = network
        self.num_embeddings = rows
        self.embedding_dim = network.out_features
        self.padding_idx = None if padding_idx is None else padding_idx % rows
        save_dense_weights_too()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        save_dense_weights_too()

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, *others: Any
    ) -> None:
        accept_factors(self, state, prefix, others[-1])
        super()._load_from_state_dict(state, prefix, metadata, *others)

    def factors(self) -> tuple[Tensor, ...]:
        """The cores, in the order and with the dimensions of the network's."""
        raise NotImplementedError

    @property
    def rank(self) -> int | tuple[int, ...]:
        """The size of what is between the factors: of all bonds, or of each if they differ."""
        sizes = tuple(self.network.size(bond) for bond in self.network.bonds)
        return sizes[0] if len(set(sizes)) == 1 else sizes

    def forward(self, index: Tensor) -> Tensor:
        """Rows of the table; index: (...) of integers -> (..., embedding_dim).

        Raises:
            IndexError: An index is no row; seen on the CPU alone, outside compiled code.
        """
        flat = index.reshape(-1)
        eager = not torch.compiler.is_compiling()
        eager = eager and not transformed() and has_values(index)
        if index.device.type == "cpu" and eager and flat.numel():
            self._check(flat)
        if index.device.type == "cpu" and eager and flat.numel() >= _MANY:
            # Elsewhere this would wait for the device.
            different, places = torch.unique(flat, return_inverse=True)
            rows = functional.embedding(places, self._rows(different))
        else:
            rows = self._rows(flat)
        return rows.view(*index.shape, self.embedding_dim)

    def _check(self, index: Tensor) -> None:
        low, high = torch.aminmax(index)
        if int(low) < 0 or int(high) >= self.num_embeddings:
            raise IndexError(
                f"indices from {int(low)} to {int(high)} into {self.num_embeddings} embeddings"
            )

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

    def dense_embedding(self) -> nn.Embedding:
        """A plain layer with the same table."""
        table = self.to_dense().detach()
        options: dict[str, Any] = {"device": table.device, "dtype": table.dtype}
        dense = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, **options)
        with torch.no_grad():
            dense.weight.copy_(table)
        return dense.train(self.training)

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

    def resized(self, rank: int | tuple[int, ...]) -> StructuredEmbedding:
        """A new layer of this form with another rank, on the same device and of the same dtype."""
        first = self.factors()[0]
        settings = {**self.settings(), "rank": rank, "device": first.device, "dtype": first.dtype}
        return type(self)(**settings)

    def extra_repr(self) -> str:
        """What `print` shows."""
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        one_rank(rank, "low_rank")
        sizes = (("i", num_embeddings), ("r", rank), ("o", embedding_dim))
        network = Network("i", "o", ("ir", "or"), sizes, num_embeddings, embedding_dim)
        super().__init__(network, padding_idx)
        self.table = nn.Embedding(num_embeddings, rank, device=device, dtype=dtype)
        self.up = nn.Linear(rank, embedding_dim, bias=False, device=device, dtype=dtype)
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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(network, padding_idx)
        self._halves = halves(network)
        self.cores = nn.ParameterList(
            torch.empty(network.shape(core), device=device, dtype=dtype)
            for core in range(len(network.cores))
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


class TTEmbedding(CoredEmbedding):
    """Tensor train: the modes of the rows one after the other, then those of the columns.

    The rank between the two halves is the rank of the table.

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

    form: ClassVar[str] = "tt"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: Ranks,
        cores: int = 3,
        *,
        row_modes: tuple[int, ...] | None = None,
        column_modes: tuple[int, ...] | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        network = train_network(
            num_embeddings,
            embedding_dim,
            rank,
            in_modes=chosen_modes(row_modes, num_embeddings, cores, name="cores"),
            out_modes=chosen_modes(column_modes, embedding_dim, cores, name="cores"),
        )
        super().__init__(network, padding_idx, device=device, dtype=dtype)


class TTMEmbedding(CoredEmbedding):
    """Tensor-train matrix: every core has a mode of the rows and one of the columns.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        rank: Size of all bonds, or of each of them.
        cores: Cores, where the modes are not given.
        row_modes: Factors of the rows; None: as even as possible, with a few rows more.
        column_modes: Factors of the columns; None: as even as possible.
        padding_idx: The row that is and stays zero.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "ttm"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: Ranks,
        cores: int = 4,
        *,
        row_modes: tuple[int, ...] | None = None,
        column_modes: tuple[int, ...] | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        network = train_matrix_network(
            num_embeddings,
            embedding_dim,
            rank,
            in_modes=chosen_modes(row_modes, num_embeddings, cores, name="cores"),
            out_modes=chosen_modes(column_modes, embedding_dim, cores, name="cores"),
        )
        super().__init__(network, padding_idx, device=device, dtype=dtype)
