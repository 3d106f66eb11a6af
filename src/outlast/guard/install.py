"""Putting the checks of single modules and functions in place, and taking them away again."""

from __future__ import annotations

import contextlib
import operator
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn
from torch.nn import functional

from outlast.guard.attention import AttentionChecks
from outlast.guard.forward_patch import trains
from outlast.guard.layers import EmbeddingChecks, NormChecks, norm_kind, why_no_embedding
from outlast.guard.linear import LINEAR_OPERATIONS, LinearChecks
from outlast.guard.loss import LossChecks, RepeatChecks
from outlast.guard.operations import OperationChecks
from outlast.guard.policy import Coverage
from outlast.guard.watch import SharedByCopies

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.guard.watch import Watch


class ProductFunction(Protocol):
    """Makes one of a layer's products."""

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Give x W^T + b; x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""


@runtime_checkable
class ProductLayer(Protocol):
    """A module whose parameters are used by `product` alone.

    A layer that is made of several products, such as a low-rank or tensor-train one, names them and
    makes each by the function that stands in its `product` attribute. The guard puts a checked one
    there::

        class LowRank(nn.Module):
            product_names = ("down", "up")

            def __init__(self, inputs, rank, outputs):
                super().__init__()
                self.product = plain_product
                self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
                self.up = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)

            def forward(self, x):
                return self.product("up", self.product("down", x, self.down), self.up)

    Every product is then checked forward and backward like that of an `nn.Linear`, with thresholds
    of its own size, and what lies between them is not.

    Attributes:
        product_names: What the products are called, in any order.
        product: Makes them.
    """

    product_names: tuple[str, ...]
    product: Any


def plain_product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The `ProductFunction` of a layer that is not guarded."""
    return functional.linear(x, weight, bias)


class CheckedProducts:
    """The `ProductFunction` of a guarded layer.

    Args:
        watch: What all checks of the guard share.
        module: A `ProductLayer`.
        name: Its name in the model.

    Attributes:
        suspended: As of a `ForwardPatch`.
    """

    def __init__(self, watch: Watch, module: nn.Module, name: str) -> None:
        assert isinstance(module, ProductLayer)
        self._module = module
        self.suspended = False
        # Of no layer: what is multiplied may be a view of a parameter, or made of several.
        self._checks = {
            product_name: LinearChecks(watch, nn.Module(), f"{name}.{product_name}")
            for product_name in module.product_names
        }

    def __reduce__(self) -> tuple[object, ...]:
        """A copied or pickled layer is one without a guard."""
        return operator.itemgetter(0), ((plain_product,),)

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `ProductFunction`."""
        if self.suspended or not trains(self._module, x, weight, bias):
            return functional.linear(x, weight, bias)
        return self._checks[name].multiply(x, weight, bias)


_REPLACED = "its forward was replaced by something else"
NO_CHECK = "no check for this kind of module"
_EMBEDDING_OPERATIONS = ("embedding.forward", "embedding.dw")
_NORM_OPERATIONS = ("norm.forward", "norm.dx", "norm.dw")


@dataclass
class Installed(SharedByCopies):
    """The checks in a model.

    Attributes:
        watch: What all of them share.
        coverage: Of every module that holds parameters, as it was found.
        linear: The linear layers' checks by name; what a use of them shows may change coverage.
        functions: The checks of functions that all models of a process share.
        undo: Takes everything away when it is closed.
    """

    watch: Watch
    coverage: list[Coverage] = field(default_factory=list)
    linear: dict[str, LinearChecks] = field(default_factory=dict)
    functions: list[AttentionChecks | LossChecks | RepeatChecks] = field(default_factory=list)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def install(watch: Watch, model: nn.Module) -> Installed:
    """Put the checks that the policy asks for into `model`; warns once of modules without any."""
    installed = Installed(watch)
    if watch.policy.reaches("linear"):
        watch.operations = OperationChecks(watch, model)
        watch.operations.install()
        installed.undo.callback(watch.operations.remove)
    watch.repeats = True
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, ProductLayer):
            inside = (*inside, f"{name}.")
        elif not any(True for _ in module.parameters(recurse=False)):
            continue
        operations, why_not = _install(installed, watch, name, module)
        installed.coverage.append(Coverage(name, type(module).__name__, operations, why_not))
    if watch.policy.reaches("full"):
        attention = AttentionChecks(watch)
        installed.functions = [attention, LossChecks(watch), RepeatChecks(watch)]
        installed.undo.callback(attention.follow(model))
        for function in installed.functions:
            installed.undo.enter_context(function.replacing())
    # Products of modules of other kinds are checked where they are called.
    by_operations = () if watch.operations is None else (NO_CHECK, _REPLACED)
    missing = [
        coverage
        for coverage in installed.coverage
        if not coverage.operations and coverage.why_not not in by_operations
    ]
    if missing and watch.policy.reaches("linear"):
        kinds = ", ".join(sorted({coverage.kind for coverage in missing}))
        warnings.warn(
            f"{len(missing)} of {len(installed.coverage)} modules with parameters are not "
            f"guarded: {kinds}; Guard.coverage() lists them",
            stacklevel=4,
        )
    return installed


def _install(
    installed: Installed, watch: Watch, name: str, module: nn.Module
) -> tuple[tuple[str, ...], str]:
    """The operations that one module's checks cover, or why it has none."""
    policy = watch.policy
    if not policy.reaches("linear", name):
        return (), f"policy {policy.level_of(name)}"
    if "forward" in module.__dict__:
        return (), _REPLACED
    transposed = _is_conv1d(module)
    if type(module).forward is nn.Linear.forward or transposed:
        checks = LinearChecks(watch, module, name, transposed=transposed)
        installed.linear[name] = checks
        _replace_forward(installed, module, checks.forward)
        return LINEAR_OPERATIONS, ""
    if isinstance(module, nn.Embedding):
        if why_not := why_no_embedding(module):
            return (), why_not
        _replace_forward(installed, module, EmbeddingChecks(watch, module, name).forward)
        return _EMBEDDING_OPERATIONS, ""
    if isinstance(module, ProductLayer):
        own = module.product
        module.product = CheckedProducts(watch, module, name)
        installed.undo.callback(setattr, module, "product", own)
        return LINEAR_OPERATIONS, ""
    if norm_kind(module) is not None:
        if not policy.reaches("full", name):
            return (), f"policy {policy.level_of(name)}"
        _replace_forward(installed, module, NormChecks(watch, module, name).forward)
        return _NORM_OPERATIONS, ""
    return (), NO_CHECK


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is the linear layer of transformers' GPT-2, whose weight is transposed."""
    forward = type(module).forward
    home = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
    return home == ("transformers.pytorch_utils", "Conv1D.forward")


def _replace_forward(installed: Installed, module: nn.Module, forward: Any) -> None:
    module.forward = forward
    installed.undo.callback(delattr, module, "forward")
