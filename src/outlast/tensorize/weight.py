"""A weight that is known by its dtype, device and shape, and made of factors when it is used.

Models look at ``linear.weight`` where they only want to know its dtype (T5 does at every call), and
rebuilding a matrix for that would cost as much as the layer.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from outlast.errors import TensorizeError
from outlast.tensorize.execute import Path
from outlast.tensorize.merge import widest
from outlast.tensorize.network import dense_route
from outlast.tensorize.operator import by_einsum
from outlast.tensorize.surroundings import no_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from outlast.tensorize.network import Network

_KNOWN = ("dtype", "device", "shape", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse")
_LOOKS = {getattr(Tensor, name).__get__ for name in _KNOWN} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
}
_DETACHED = {Tensor.data.__get__, Tensor.detach}  # type: ignore[attr-defined]


class _Weight(Tensor):
    """See the module; whatever is computed with it is computed with the dense weight."""

    _layer: Any
    _detached = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _LOOKS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        name = getattr(func, "__name__", "")
        if func in _DETACHED:
            # Not made yet, so that changes in place do not get lost in a tensor that nobody keeps.
            return weight_of(args[0]._layer, tuple(args[0].shape), detached=True)
        changes = name.endswith("_") and not name.endswith("__")
        if changes and args and isinstance(args[0], _Weight):
            raise TensorizeError(
                f"a weight that is made of factors is read-only, and {name} would change a copy: "
                "change its factors, or exclude the layer from tensorize"
            )
        args, kwargs = tree_map(_dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _dense(value: Any) -> Any:
    if not isinstance(value, _Weight):
        return value
    dense = value._layer.to_dense()
    return dense.detach() if value._detached else dense


def dense_matrix(network: Network, cores: Sequence[Tensor]) -> Tensor:
    """The matrix that a network makes of its cores; exact and differentiable.

    Args:
        network: The map.
        cores: Its cores.

    Returns:
        (out_features, in_features), in the widest of the cores' dtypes whatever autocast says.
    """
    with no_autocast(cores[0].device):
        if torch.compiler.is_compiling():
            return by_einsum(tuple(cores), network)
        return Path(network, dense_route(network), cores, widest(cores)).matrices[0][0]


def weight_of(layer: nn.Module, shape: tuple[int, ...], *, detached: bool = False) -> Tensor:
    """What stands for a layer's weight.

    Args:
        layer: Has `factors` and `to_dense`; one that is no matrix raises its own error when
            something is computed with the weight.
        shape: Of the weight.
        detached: Whether its numbers are no function of the factors.
    """
    structured: Any = layer
    factors = structured.factors()
    dtype = widest(factors)
    if torch.compiler.is_compiling():
        # The compiler does not know the class above, and leaves out what nothing uses.
        return structured.to_dense()  # type: ignore[no-any-return]
    # One number, shown as often as there are entries, has all that is looked at.
    weight = torch.empty((), dtype=dtype, device=factors[0].device).expand(shape)
    lazy = weight.as_subclass(_Weight)
    lazy._layer, lazy._detached = structured, detached
    return lazy


def accept_factors(
    layer: nn.Module, state: dict[str, Any], prefix: str, problems: list[str]
) -> None:
    """Refuse a dense weight in a state that is loaded into a layer of factors.

    ``strict=False``, with which trainers load, would leave the factors as they are without a word.
    A state that holds the factors as well, as those of `save_pretrained` do, has them loaded.

    Args:
        layer: Has `form`.
        state: What is loaded; the dense weight and bias are taken out of it.
        prefix: Of the layer's names in it.
        problems: Gets a sentence, which `load_state_dict` raises however strict it is.
    """
    if state.pop(f"{prefix}weight", None) is None:
        return
    own = {*layer._parameters, *layer._buffers, *layer._modules}
    if "bias" not in own:
        state.pop(f"{prefix}bias", None)
    names = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    if not any(name != "bias" and f"{prefix}{name}" in state for name in names):
        problems.append(
            f"{prefix}weight is dense, and the layer is made of factors (form = "
            f"{layer.form!r}): load dense weights before tensorize, and call it with "
            "init = 'from_dense'"
        )


def save_dense_weights_too() -> None:
    """Let ``save_pretrained`` of transformers write dense weights beside a model's factors.

    It knows its models by their class, which says nothing of factors: a folder of factors alone
    would load with new random weights. Every layer of factors calls this, since models are copied,
    pickled and saved in parts, and the method belongs to the class that all of them share.
    """
    modelling = sys.modules.get("transformers.modeling_utils")
    kind = getattr(modelling, "PreTrainedModel", None)
    if kind is None or hasattr(kind.save_pretrained, "_writes_dense_weights"):
        return
    plain = kind.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(model: Any, save_directory: Any, *positional: Any, **named: Any) -> Any:
        from outlast.tensorize.export import save_with_dense_weights

        return save_with_dense_weights(plain, model, save_directory, *positional, **named)

    save_pretrained._writes_dense_weights = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained
