"""What new layers hold at first: random factors of the right size, or those of a dense weight."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from outlast.tensorize.convert.factored import Factored
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
        return _convert_sparse(layer, weight)
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


def _convert_sparse(layer: Any, weight: Tensor) -> float:
    from outlast.tensorize.convert.sparse import low_rank_and_sparse

    rank = layer.down.out_features
    found = low_rank_and_sparse(weight, rank=rank, density=layer.density)
    down, up, values, indices = found.cores
    layer.down.weight.copy_(down)
    layer.up.weight.copy_(up / layer.scale)
    layer.values.copy_(values)
    layer.indices.copy_(indices)
    return found.relative_error


def _factored(network: Network, form: str, weight: Tensor) -> tuple[Factored, tuple[str, ...]]:
    """Cores, and the letters of their dimensions in the order in which conversions give them."""
    from outlast.tensorize.convert import blocks, svd, tensor_train
    from outlast.tensorize.convert.cp import to_cp
    from outlast.tensorize.convert.tucker import to_tucker

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
        found = blocks.to_blocks(weight, in_modes=(m, i), out_modes=(n, o), rank=ranks[0])
        return found, network.cores
    to = {
        "tt": tensor_train.to_tensor_train,
        "ttm": tensor_train.to_tensor_train_matrix,
        "tucker": to_tucker,
    }[form]
    return to(weight, in_modes=into, out_modes=out, rank=ranks), network.cores
