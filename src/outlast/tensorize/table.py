"""Replaced layers: their first numbers, and a table of them for a person or a program.

New layers hold random factors of the right size, or those of a dense weight.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.tensorize.convert.svd import Factored
    from outlast.tensorize.network import Network
    from outlast.tensorize.policy import Target


CONVERTIBLE = ("low_rank", "tt", "ttm", "btt", "monarch", "tucker", "cp", "sltrain")
"""Forms that a dense weight is turned into; all but ``cp`` and ``sltrain`` without a search."""


def starting_std(target: Target, model: nn.Module) -> float:
    """Root mean square of the dense weight: what the product of the factors gets.

    A weight without values (meta) counts as initialised the way its model says: by
    ``config.initializer_range``, or like a new `nn.Linear` or `nn.Embedding`.
    """
    weight = target.weight
    if not weight.is_meta:
        return float(weight.to(torch.float32).square().mean().sqrt())
    said = getattr(getattr(model, "config", None), "initializer_range", None)
    if isinstance(said, int | float) and said > 0:
        return float(said)
    return 1.0 if target.is_embedding else 1.0 / math.sqrt(3 * target.features[0])


def seed_of(generator: torch.Generator | None) -> int:
    """A seed for all layers, the next number of a generator; None: of torch's own."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=device))


def generator_for(name: str, base: int, device: torch.device) -> torch.Generator | None:
    """A generator of a layer's own, whatever order layers are made in; None on meta."""
    if device.type == "meta":
        return None
    digest = hashlib.blake2b(f"{base}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def draw(layer: Any, std: float, generator: torch.Generator | None) -> None:
    """Give the product of a layer's factors a standard deviation."""
    layer.reset_parameters(std, generator)


def check_convertible(form: str) -> None:
    """Refuse forms that no dense weight is turned into.

    Raises:
        TensorizeError: See above.
    """
    if form in CONVERTIBLE:
        return
    remedies = {
        "cola": "its nonlinearity makes it no matrix: start from scratch and distil the dense "
        "model into it (outlast.tensorize.convert.distill.distill_model), or use form = 'low_rank'",
        "lax": "its layers add up: start from scratch, or use form = 'low_rank'",
    }
    why = remedies.get(form, f"there are conversions to {', '.join(CONVERTIBLE)} alone")
    raise TensorizeError(f"init = 'from_dense' does not go with form = {form!r}: {why}")


@torch.no_grad()
def convert(layer: Any, form: str, weight: Tensor) -> float:
    """Give a layer the factors nearest to a dense weight.

    Args:
        layer: A layer of one of `CONVERTIBLE`.
        form: Which.
        weight: (out, in); of an embedding (features, rows).

    Returns:
        ``|W - product| / |W|`` in the Frobenius norm.

    Raises:
        TensorizeError: See `check_convertible`, or the weight has no finite values.
    """
    check_convertible(form)
    if form == "sltrain":
        from outlast.tensorize.convert.svd import low_rank_and_sparse

        rank = layer.down.out_features
        answer = low_rank_and_sparse(weight, rank=rank, density=layer.density)
        down, up, values, indices = answer.cores
        layer.down.weight.copy_(down)
        layer.up.weight.copy_(up / layer.scale)
        layer.values.copy_(values)
        layer.indices.copy_(indices)
        return answer.relative_error
    network: Network = layer.network
    found, given = _factored(network, form, weight)
    for factor, core, letters, wanted in zip(
        layer.factors(), found.cores, given, network.cores, strict=True
    ):
        turned = core.permute([letters.index(letter) for letter in wanted])
        if turned.shape != factor.shape:
            # A conversion can need less than the rank that was asked for.
            factor.zero_()
        factor[tuple(map(slice, turned.shape))].copy_(turned)
    return found.relative_error


def _factored(network: Network, form: str, weight: Tensor) -> tuple[Factored, tuple[str, ...]]:
    """Cores, and the letters of their dimensions in the order in which conversions give them."""
    from outlast.tensorize.convert import svd, tensor_train
    from outlast.tensorize.convert.tensor_train import to_cp, to_tucker

    into = tuple(network.size(letter) for letter in network.inputs)
    out = tuple(network.size(letter) for letter in network.outputs)
    ranks = tuple(network.size(letter) for letter in network.bonds)
    if form == "low_rank":
        bond = network.bonds
        given = (bond + network.inputs, network.outputs + bond)
        return svd.low_rank(weight, rank=ranks[0]), given
    if form == "cp":
        letters = tuple(mode + network.bonds for mode in network.inputs + network.outputs)
        return to_cp(weight, in_modes=into, out_modes=out, rank=ranks[0]), letters
    if form in ("btt", "monarch"):
        (m, i), (n, o) = into, out
        found = svd.to_blocks(weight, in_modes=(m, i), out_modes=(n, o), rank=ranks[0])
        return found, network.cores
    to = {
        "tt": tensor_train.to_tensor_train,
        "ttm": tensor_train.to_tensor_train_matrix,
        "tucker": to_tucker,
    }[form]
    return to(weight, in_modes=into, out_modes=out, rank=ranks), network.cores


_WIDTH = 132


@dataclass(frozen=True)
class Replacement:
    """One replaced layer.

    Attributes:
        name: Its name in the model; of several, the first.
        form: What it became.
        rank: Its rank or ranks.
        parameters: Of its factors; 0 where they are another layer's.
        dense_parameters: Of the weight that was replaced; 0 where it was shared.
        flops_per_token: Forward, by the plan for the tokens that were asked about.
        dense_flops_per_token: Of the dense layer; 0 for an embedding.
        speed: Predicted time of the dense layer over its own, forward and backward; None: the
            planner does not know.
        error: ``|W - product| / |W|`` (Frobenius) of a converted weight; None: from scratch.
        std: Standard deviation that the product was drawn with; None: converted.
    """

    name: str
    form: str
    rank: int | tuple[int, ...]
    parameters: int
    dense_parameters: int
    flops_per_token: float
    dense_flops_per_token: float
    speed: float | None = None
    error: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class KeptLayer:
    """Layer that stays dense.

    Attributes:
        name: Of a layer, or of a parameter that is no layer's weight.
        parameters: How many numbers it has; 0 where they are another's.
        why: Why, to follow the name.
    """

    name: str
    parameters: int
    why: str


@dataclass(frozen=True, eq=False)
class Replacements:
    """All that `tensorize` did; prints as a table.

    Attributes:
        replaced: The layers that were replaced, in the order of the model.
        refused: Name of each layer that was to be replaced and stays dense -> why.
        modules: The new layers by name.
        parameters: Of the whole model now, tied ones once.
        dense_parameters: Before.
        tokens: Number of tokens that speeds were predicted for.
        kept: All of the model that stays dense, those of `refused` among it. With the dense
            parameters of `replaced` it has every parameter of the dense model once.
        basis: How speeds are known: ``predicted`` or ``timed``, and from what.
    """

    replaced: tuple[Replacement, ...]
    refused: dict[str, str]
    modules: dict[str, nn.Module]
    parameters: int
    dense_parameters: int
    tokens: int
    kept: tuple[KeptLayer, ...] = ()
    basis: str = "predicted"

    def __len__(self) -> int:
        return len(self.replaced)

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.replaced)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types."""
        return {
            "replaced": [
                {**asdict(row), "share": self.share_of(row.dense_parameters)}
                for row in self.replaced
            ],
            "kept": [{**asdict(row), "share": self.share_of(row.parameters)} for row in self.kept],
            "refused": dict(self.refused),
            "parameters": self.parameters,
            "dense_parameters": self.dense_parameters,
            "tokens": self.tokens,
            "basis": self.basis,
        }

    def share_of(self, parameters: int) -> float:
        """Of the dense model's parameters."""
        return parameters / self.dense_parameters if self.dense_parameters else 0.0

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the factors of layers from scratch anew, with the deviations of the first time.

        For models that were built on the meta device and have got memory since (`to_empty`), on
        all ranks with the same generator state; biases become zero.

        Args:
            generator: Source of the seed of all layers; None: torch's own.
        """
        base = seed_of(generator)
        for one in self.replaced:
            if one.std is None:
                continue
            layer: Any = self.modules[one.name]
            device = next(layer.parameters()).device
            layer.reset_parameters(one.std, generator_for(one.name, base, device))
            bias = getattr(layer, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)

    def __str__(self) -> str:
        return as_text(self)


_HEADINGS = (
    "layers", "form", "rank", "parameters", "dense", "share", "FLOPs/token", "dense", "speed",
    "error",
)  # fmt: skip


def as_text(report: Replacements) -> str:
    """The table in plain text.

    Layers whose names differ in numbers alone share a line where all but their errors are equal.
    FLOPs are forward; speed is predicted for forward and backward.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_footer=True)
    for heading, total in zip(_HEADINGS, _totals(report), strict=True):
        first = heading in ("layers", "form")
        table.add_column(
            heading,
            total,
            justify="left" if first else "right",
            no_wrap=heading != "layers",
            overflow="fold",
        )
    for line in _lines(report):
        table.add_row(*line)
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, color_system=None, markup=False).print(table)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    before, after = report.dense_parameters, report.parameters
    share = after / before if before else 1.0
    how, _, source = report.basis.partition(" ")
    lines.append(
        f"model: {_count(before)} -> {_count(after)} parameters ({share:.1%}); speeds are "
        f"{how} for {report.tokens} tokens, forward and backward"
    )
    lines += [f"{how} {source}"] if source else []
    reasons: dict[str, list[KeptLayer]] = {}
    for row in report.kept or [KeptLayer(name, 0, why) for name, why in report.refused.items()]:
        reasons.setdefault(row.why, []).append(row)
    for why, rows in reasons.items():
        numbers = sum(row.parameters for row in rows)
        part = f" ({report.share_of(numbers):.1%} of the parameters)" if numbers else ""
        lines.append(f"kept dense: {_grouped([row.name for row in rows])}: {why}{part}")
    return "\n".join(lines)


def _lines(report: Replacements) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[Replacement]] = {}
    for one in report.replaced:
        shared = one.parameters == 0
        cells = (
            _pattern(one.name),
            one.form,
            str(one.rank) if isinstance(one.rank, int) else "-".join(map(str, one.rank)),
            "shared" if shared else _count(one.parameters),
            "shared" if shared else _count(one.dense_parameters),
            _count(one.flops_per_token),
            _count(one.dense_flops_per_token),
            _speed(one.speed) if one.speed or not one.dense_flops_per_token else "unknown",
        )
        groups.setdefault(cells, []).append(one)
    return [
        (
            _grouped([one.name for one in ones]),
            *cells[1:5],
            f"{report.share_of(sum(one.dense_parameters for one in ones)):.1%}",
            *cells[5:],
            _errors(ones),
        )
        for cells, ones in groups.items()
    ]


def _errors(replaced: Sequence[Replacement]) -> str:
    """The error, or the smallest and the largest."""
    errors = [f"{one.error:.3f}" for one in replaced if one.error is not None]
    if not errors or min(errors) == max(errors):
        return errors[0] if errors else ""
    return f"{min(errors)} to {max(errors)}"


def _totals(report: Replacements) -> tuple[str, ...]:
    sums = [
        sum(getattr(one, field) for one in report.replaced)
        for field in (
            "parameters", "dense_parameters", "flops_per_token", "dense_flops_per_token"
        )
    ]  # fmt: skip
    count = len(report.replaced)
    own, dense, *flops = map(_count, sums)
    share = f"{report.share_of(int(sums[1])):.1%}"
    return (
        f"{count} layer{'' if count == 1 else 's'}", "", "", own, dense, share, *flops,
        _whole(report), "",
    )  # fmt: skip


def _whole(report: Replacements) -> str:
    """The speed of all layers together, where every one's is known."""
    linear = [one for one in report.replaced if one.dense_flops_per_token]
    if not linear or any(one.speed is None for one in linear):
        return ""
    # Dense layers of one model run at about the same rate, so their operations weigh.
    dense = sum(one.dense_flops_per_token for one in linear)
    mine = sum(one.dense_flops_per_token / (one.speed or 1.0) for one in linear)
    return _speed(dense / mine)


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _grouped(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    counts: dict[str, int] = {}
    for name in names:
        counts[_pattern(name)] = counts.get(_pattern(name), 0) + 1
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items())


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"{speed:.2f}x"


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g}"
