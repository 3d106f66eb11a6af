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
from torch.utils._pytree import tree_leaves, tree_map

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
_LEARNS = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_LEARN = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_KEEP = {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
}
"""What asks something of the very tensor, which nobody has."""


class _Weight(Tensor):
    """See the module; whatever is computed with it is computed with the dense weight.

    What shows a part of the dense weight, such as a row, is read-only as well: it has no layer.
    """

    _layer: Any = None
    _detached = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        layer = args[0]._layer if args and isinstance(args[0], _Weight) else None
        if func in _LOOKS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _DETACHED and layer is not None:
            # Not made yet: it is as lazy as what it is detached from.
            return weight_of(layer, tuple(args[0].shape), detached=True)
        if layer is not None and not args[0]._detached:
            if func in _LEARN:
                for factor in layer.factors():
                    func(factor, *args[1:], **kwargs)
                return args[0]
            if func == _LEARNS:
                return any(factor.requires_grad for factor in layer.factors())
        name = getattr(func, "__name__", "")
        if func in _KEEP or _is_written(name, args, kwargs):
            raise _read_only(name)
        made: list[Tensor] = []
        args, kwargs = tree_map(functools.partial(_dense, made=made), (args, kwargs))
        versions = [None if dense.is_inference() else dense._version for dense in made]
        result = func(*args, **kwargs)
        # Operators that change an argument need not have a name that says so.
        if any(
            was not in (None, dense._version) for was, dense in zip(versions, made, strict=True)
        ):
            raise _read_only(name)
        return tree_map(functools.partial(_guarded, made=made), result)


def _is_written(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function of that name changes a weight among its arguments."""
    written = kwargs.get("out")
    if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
        # Functions of torch.nn.init get all that they are called with by keyword.
        written = (written, args[0] if args else kwargs)
    return any(isinstance(leaf, _Weight) for leaf in tree_leaves(written))


def _read_only(name: str) -> TensorizeError:
    return TensorizeError(
        f"a weight that is made of factors is read-only, and {name} would act on a copy: change "
        "its factors, exclude the layer from tensorize, or clone() the weight to change a copy"
    )


def _dense(value: Any, made: list[Tensor]) -> Any:
    """The dense weight in the place of what stands for it, noted in `made`."""
    if not isinstance(value, _Weight):
        return value
    dense: Tensor
    if value._layer is None:
        with torch._C.DisableTorchFunctionSubclass():
            dense = value.as_subclass(Tensor)
    else:
        # Outside of inference mode, in which nobody could tell that it was changed.
        with torch.inference_mode(mode=False):
            dense = value._layer.to_dense()
        dense = dense.detach() if value._detached else dense
    made.append(dense)
    return dense


def _guarded(value: Any, made: list[Tensor]) -> Any:
    """A result, read-only if it shows a dense weight that was made for it alone."""
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    if isinstance(value, Tensor) and any(is_alias(value, dense) for dense in made):
        return value.as_subclass(_Weight)
    return value


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
