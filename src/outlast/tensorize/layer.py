"""Layers whose weight is made of factors, in the place of an `nn.Linear`, and forms of cores.

Block tensor-train and Monarch are two block-diagonal matrices with a permutation between; tensor
trains are chains of cores over factors of the features; Tucker has a factor for every mode and one
core over all their ranks; CP is a sum of products with one factor per mode.

Their `weight` is known by its dtype, device and shape, and made of factors when it is used: models
look at ``linear.weight`` where they only want to know its dtype (T5 does at every call), and
rebuilding a matrix for that would cost as much as the layer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from outlast.errors import TensorizeError
from outlast.tensorize.execute import MergedPath, no_autocast, widest
from outlast.tensorize.initialize import initialize_
from outlast.tensorize.network import (
    Ranks,
    block_network,
    chosen_modes,
    cp_network,
    dense_route,
    one_rank,
    train_matrix_network,
    train_network,
    tucker_network,
)
from outlast.tensorize.operator import Merged, by_einsum, chain
from outlast.tensorize.planner import explain
from outlast.tensorize.shapes import block_modes, monarch_modes, monarch_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

_KEEP = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
"""Operations that need the very tensor, which nobody has."""


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
        written = kwargs.get("out")
        if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            # Functions of torch.nn.init get all that they are called with by keyword.
            written = (written, args[0] if args else kwargs)
        if func in _KEEP or any(isinstance(leaf, _Weight) for leaf in tree_leaves(written)):
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
        return MergedPath(network, dense_route(network), cores, widest(cores)).matrices[0][0]


def weight_of(layer: nn.Module, shape: tuple[int, ...], *, detached: bool = False) -> Tensor:
    """Return a lazy stand-in for a layer's weight.

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
        from outlast.tensorize import save_with_dense_weights

        return save_with_dense_weights(plain, model, save_directory, *positional, **named)

    save_pretrained._writes_dense_weights = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


class StructuredLayer(nn.Module):
    """A layer that is made of factors; the base of linear layers and embeddings.

    Attributes:
        form: The name that `tensorize` knows the form by.
        network: How the factors make the weight.
    """

    form: ClassVar[str]

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
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

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer; ``type(layer)(**layer.settings())`` is another."""
        raise NotImplementedError


class StructuredLinear(StructuredLayer):
    """A linear layer whose weight is made of factors; the base of the forms.

    Takes the place of an `nn.Linear`: any leading dimensions, autocast, the meta device.

    Attributes:
        in_features: Size of the last dimension of x.
        out_features: Size of the last dimension of y.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.in_features = network.in_features
        self.out_features = network.out_features

    def _bias(self) -> Tensor | None:
        return self.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        return chain(x, self.factors(), self.network, self._bias())

    def to_dense(self) -> Tensor:
        """The weight, of shape (out_features, in_features); exact and differentiable."""
        return dense_matrix(self.network, self.factors())

    @property
    def weight(self) -> Tensor:
        """The weight of the `nn.Linear` in whose place this is; read-only.

        For code of models that looks at ``linear.weight.dtype`` and the like, which costs nothing.
        Its numbers are made when they are used, each time, and are differentiable.
        """
        return weight_of(self, (self.out_features, self.in_features))

    def dense_linear(self) -> nn.Linear:
        """A plain layer with the same weight and bias."""
        weight, bias = self.to_dense().detach(), self._bias()
        options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, **options)
        with torch.no_grad():
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        return linear.train(self.training)

    @torch.no_grad()
    def reset_parameters(
        self, std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw the factors anew, so that the weight's entries have a standard deviation.

        Args:
            std: That of the weight; None: 1 / sqrt(3 in_features), that of a new `nn.Linear`.
            generator: Where the numbers come from; None: torch's own.
        """
        std = 1 / math.sqrt(3 * self.in_features) if std is None else std
        initialize_(self.factors(), self.network, std, generator=generator)
        bias = self._bias()
        if bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            bias.uniform_(-bound, bound, generator=generator)

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer; ``type(layer)(**layer.settings())`` is another."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rank": self.rank,
            "bias": self._bias() is not None,
        }

    def explain(self, tokens: int = 4096) -> str:
        """Describe the layer's plan for a number of tokens and its alternatives, with costs."""
        cores = self.factors()
        return explain(self.network, tokens, widest(cores), cores[0].device)

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        dense = self.in_features * self.out_features
        share = self.network.parameters / dense
        biased = self._bias() is not None
        return (
            f"{self.in_features}, {self.out_features}, rank={self.rank}, bias={biased}, "
            f"{share:.1%} of the dense parameters"
        )


class Factory(TypedDict, total=False):
    """Device and type of a new layer's parameters."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ChainSettings(Factory, total=False):
    """Settings of a linear layer that is a chain of cores; see `_TrainLinear`."""

    in_modes: tuple[int, ...] | None
    out_modes: tuple[int, ...] | None
    bias: bool


class CoredLinear(StructuredLinear):
    """A form whose factors are the parameters ``cores.0``, ``cores.1`` and so on.

    Args:
        network: How the cores make the weight.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    bias: nn.Parameter | None
    _merged: Merged | None = None

    def __init__(self, network: Network, *, bias: bool = True, **factory: Unpack[Factory]) -> None:
        super().__init__(network)
        self.cores = nn.ParameterList(
            torch.empty(network.shape(core), **factory) for core in range(len(network.cores))
        )
        empty = torch.empty(network.out_features, **factory) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def factors(self) -> tuple[Tensor, ...]:
        """The cores."""
        return tuple(self.cores)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        return chain(x, tuple(self.cores), self.network, self.bias, merged=self._merged)

    def __getstate__(self) -> dict[str, Any]:
        """Without merged cores: a copy has cores of its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_merged"}

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        sizes = dict(self.network.sizes)
        return {
            **super().settings(),
            "in_modes": tuple(sizes[letter] for letter in self.network.inputs),
            "out_modes": tuple(sizes[letter] for letter in self.network.outputs),
        }


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Within this context a model's layers merge their cores once and not at every call.

    For inference: with gradients nothing is kept. Updates in place, `load_state_dict` and ``.to()``
    are noticed; writing through ``parameter.data`` is not.

    Args:
        model: A model with tensorized layers.
    """
    layers = [module for module in model.modules() if isinstance(module, CoredLinear)]
    before = [layer._merged for layer in layers]
    for layer in layers:
        layer._merged = Merged()
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer._merged = old


class BTTLinear(CoredLinear):
    """Block tensor-train of two cores: full rank with few parameters.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Rank of each of the blocks that the weight is cut into.
        in_modes: Two factors of the input features; None: near the square root.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "btt"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        *,
        in_modes: tuple[int, int] | None = None,
        out_modes: tuple[int, int] | None = None,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        one_rank(rank, self.form)
        into, out = block_modes(in_features, out_features)
        modes = {"in_modes": in_modes or into, "out_modes": out_modes or out}
        network = block_network(in_features, out_features, rank, **modes)
        super().__init__(network, bias=bias, **factory)


class MonarchLinear(BTTLinear):
    """Two block-diagonal matrices of `blocks` blocks each (Dao et al. 2022, arXiv 2204.00595).

    x goes through blocks of (in / blocks) features each, every one of which gives as many, and a
    transposition deals these out to the blocks of the second matrix.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Blocks of each matrix. The parameters are (in + out) min(in, out) / blocks while
            blocks^2 divides min(in, out); from blocks^2 = min(in, out) on they grow again, as
            (in + out) blocks.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    form: ClassVar[str] = "monarch"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocks: int = 4,
        *,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        into, out = monarch_modes(in_features, out_features, blocks)
        rank = monarch_rank(in_features, out_features, blocks)
        super().__init__(
            in_features, out_features, rank, in_modes=into, out_modes=out, bias=bias, **factory
        )
        self.blocks = blocks

    def settings(self) -> dict[str, Any]:
        """The arguments that build such a layer."""
        modes = ("rank", "in_modes", "out_modes")
        rest = {key: value for key, value in super().settings().items() if key not in modes}
        return {**rest, "blocks": self.blocks}


class _TrainLinear(CoredLinear):
    """A chain of cores over factors of the features.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Size of all bonds, or of each of them.
        cores: Modes on each side, where they are not given.
        in_modes: Factors of the input features; None: as even as possible.
        out_modes: Likewise of the output features.
        bias: Whether there is a bias.
        device: Where the parameters lie.
        dtype: Theirs.
    """

    build: ClassVar[Callable[..., Network]]
    count_name: ClassVar[str] = "cores"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: Ranks,
        cores: int = 3,
        *,
        in_modes: tuple[int, ...] | None = None,
        out_modes: tuple[int, ...] | None = None,
        bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        into = chosen_modes(in_modes, in_features, cores, name=self.count_name)
        out = chosen_modes(out_modes, out_features, cores, name=self.count_name)
        network = self.build(in_features, out_features, rank, in_modes=into, out_modes=out)
        super().__init__(network, bias=bias, **factory)


class TTLinear(_TrainLinear):
    """Tensor train: the modes of the inputs one after the other, then those of the outputs.

    The rank between the two halves is the rank of the weight. See `_TrainLinear` for the arguments.
    """

    form: ClassVar[str] = "tt"
    build = staticmethod(train_network)


class TTMLinear(_TrainLinear):
    """Tensor-train matrix: every core has a mode of the inputs and one of the outputs.

    See `_TrainLinear` for the arguments.
    """

    form: ClassVar[str] = "ttm"
    build = staticmethod(train_matrix_network)


class _ModesLinear(_TrainLinear):
    """One factor per mode of inputs and outputs.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Of Tucker: of every mode, or of each of them, those of the inputs first; of CP: terms
            of the sum.
        modes: Modes on each side, where they are not given.
        settings: As of `_TrainLinear`.
    """

    count_name: ClassVar[str] = "modes"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: Ranks,
        modes: int = 2,
        **settings: Unpack[ChainSettings],
    ) -> None:
        super().__init__(in_features, out_features, rank, modes, **settings)


class TuckerLinear(_ModesLinear):
    """A factor for each mode of inputs and outputs, and one core between them.

    The core has a dimension per mode: with more than two modes on a side it soon is the largest
    part. See `_ModesLinear` for the arguments.
    """

    form: ClassVar[str] = "tucker"
    build = staticmethod(tucker_network)


class CPLinear(_ModesLinear):
    """A sum of `rank` products that have one factor per mode (canonical polyadic).

    The rank of the weight is at most `rank`, for far fewer parameters than two factors have. See
    `_ModesLinear` for the arguments.
    """

    form: ClassVar[str] = "cp"
    build = staticmethod(cp_network)
