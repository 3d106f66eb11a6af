"""Structured layers in a model of torchtitan: `TensorizeConverter`.

It changes the tree of a model's settings before the model is built, as torchtitan's own converters
do. A layer becomes two of torchtitan's linear layers, so that FSDP2, tensor parallelism,
activation checkpointing and compilation treat the factors like any other layer.
"""

from __future__ import annotations

import fnmatch
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.initialize import activation_gain, core_stds
from outlast.tensorize.low_rank import low_rank_network
from outlast.tensorize.policy import LayerShape, resolved_rank
from outlast.tensorize.shapes import form_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_PROBED_ROWS = 256
"""Rows of a weight that are initialised to find their standard deviation."""

_logger = logging.getLogger(__name__)


class TwoFactorLinear(Module):  # type: ignore[misc]
    """y = act(x A^T) B^T + b with the layers ``down`` and ``up``, in the place of a `Linear`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """The settings of the layer in whose place it is, and those of the factors."""

        rank: int
        """Features between the factors."""

        activation: str | None = None
        """Between the factors; None: nothing, a plain product."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.in_features = config.in_features
        self.out_features = config.out_features
        self._activation = ACTIVATIONS[config.activation] if config.activation else None
        before, after = _shardings(config.sharding_config)
        given = config.param_init or {}
        down, up = _stds(config, given.get("weight"))
        self.down = Linear.Config(
            in_features=config.in_features,
            out_features=config.rank,
            param_init={"weight": partial(nn.init.normal_, std=down)},
            sharding_config=before,
        ).build()
        self.up = Linear.Config(
            in_features=config.rank,
            out_features=config.out_features,
            bias=config.bias,
            param_init={
                "weight": partial(nn.init.normal_, std=up),
                "bias": given.get("bias", nn.init.zeros_),
            },
            sharding_config=after,
        ).build()

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; input: (..., in_features) -> (..., out_features)."""
        latent = self.down(input)
        if self._activation is not None:
            latent = self._activation(latent)
        result: Tensor = self.up(latent)
        return result

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the factors as the layer's weight would be.

        Raises:
            TensorizeError: For tensor parallelism, which would have to sum between the factors.
        """
        if parallel_dims.tp_enabled:
            raise TensorizeError(
                f"parallelism.tensor_parallel_degree = {parallel_dims.tp} does not go with "
                "TensorizeConverter: its factors are whole on every rank; set it to 1 and shard "
                "with data_parallel_shard_degree"
            )
        super().parallelize(parallel_dims)


def _shardings(base: Any) -> tuple[Any, Any]:
    """Shardings of `down` and `up`, from what the dense layer does: a side each."""
    weight = base.state_shardings.get("weight") if base is not None else None
    if weight is None:
        return None, None
    whole = {"weight": dense_param_placement(tp=spmd.R)}
    # Without tensor parallelism these are all the same; the layers must declare them.
    if weight == dense_param_placement(tp=spmd.S(0)):
        return ShardingConfig(state_shardings=whole), ShardingConfig(
            state_shardings=dict(base.state_shardings)
        )
    bias = base.state_shardings.get("bias", whole["weight"])
    return ShardingConfig(state_shardings={"weight": weight}), ShardingConfig(
        state_shardings=whole | {"bias": bias}
    )


def _stds(
    config: TwoFactorLinear.Config, initialize: Callable[[Tensor], Any] | None
) -> tuple[float, float]:
    """Standard deviations of the factors that give their product that of the dense weight."""
    rows = min(config.out_features, _PROBED_ROWS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        probe = torch.empty(rows, config.in_features, device="cpu", dtype=torch.float32)
        (initialize or partial(nn.init.kaiming_uniform_, a=5**0.5))(probe)
    network = low_rank_network(config.in_features, config.out_features, config.rank)
    gain = activation_gain(config.activation) if config.activation else 1.0
    down, up = core_stds(network, float(probe.square().mean().sqrt()), gain)
    return down, up


class TensorizeConverter(ModelConfigConverter):  # type: ignore[misc]
    """Replaces linear layers of a model by two factors, before it is built.

    It stands among the ``converters`` of a model's registry::

        model_registry("8B", converters=[TensorizeConverter.Config(form="cola", rank=0.25)])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """Choice of layers and their form; as in `outlast.tensorize.tensorize`."""

        form: Literal["low_rank", "cola"] = "low_rank"
        """Two factors, or two with a nonlinearity between them."""

        rank: int | float | str = 0.25
        """A number; a fraction of the narrower side; or a budget such as "parameters=0.3"."""

        match: list[str] = field(default_factory=lambda: ["*.feed_forward.*"])
        """Patterns of names of layers; ``lm_head`` only by its own name."""

        activation: str | None = None
        """Between the factors of ``cola``; None: SiLU."""

        multiple: int = 16
        """Of which ranks that are fractions or budgets shall be."""

        def __post_init__(self) -> None:
            """Refuse what no layer could become."""
            if self.form not in ("low_rank", "cola"):
                raise TensorizeError(
                    f"form = {self.form!r} is not possible in torchtitan: its layers become two "
                    "linear layers; choose low_rank or cola"
                )
            if self.activation is not None and self.form != "cola":
                raise TensorizeError(
                    f"activation = {self.activation!r} needs form = 'cola', which has one"
                )
            if self.activation is not None:
                activation_gain(self.activation)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the settings of the layers in the tree.

        Raises:
            TensorizeError: A pattern fits nothing, or a layer cannot be replaced.
        """
        used: set[str] = set()
        before = after = 0
        for name, layer, parent, place in list(model_config.traverse(Linear.Config)):
            fitting = [item for item in self.config.match if fnmatch.fnmatchcase(name, item)]
            if name == "lm_head":
                fitting = [item for item in fitting if item == name]
            used.update(fitting)
            if not fitting or parent is None:
                continue
            new = self._converted(name, layer, model_config)
            before += layer.in_features * layer.out_features
            after += new.rank * (layer.in_features + layer.out_features)
            if isinstance(parent, list):
                parent[place] = new
            else:
                setattr(parent, place, new)
        if unused := [name for name in self.config.match if name not in used]:
            raise TensorizeError(
                f"match = {unused[0]!r} fits no linear layer of the model; names are like "
                "layers.0.feed_forward.w1"
            )
        _logger.info("tensorized layers have %d of %d parameters", after, before)
        return model_config

    def _converted(self, name: str, layer: Any, model_config: Any) -> TwoFactorLinear.Config:
        if type(layer) is not Linear.Config:
            raise TensorizeError(
                f"{name} is a {type(layer).__qualname__}, whose own way to multiply would be lost; "
                "leave it out of match, or put TensorizeConverter before other converters"
            )
        if name.endswith(".wqkv"):
            raise TensorizeError(
                f"{name} is cut into three when it is saved, which its factors cannot be; build "
                "the attention with fuse_qkv = False, or leave it out of match"
            )
        if name == "lm_head" and getattr(model_config, "enable_weight_tying", False):
            raise TensorizeError("lm_head shares its weight with the embedding: leave it dense")
        form = form_named(self.config.form)
        try:
            shape = LayerShape(
                form, layer.in_features, layer.out_features, None, self.config.multiple
            )
            rank = resolved_rank(self.config.rank, shape)
        except TensorizeError as error:
            raise TensorizeError(f"{name}: {error}") from error
        dense = layer.in_features * layer.out_features
        assert isinstance(rank, int)
        if rank * (layer.in_features + layer.out_features) >= dense:
            raise TensorizeError(
                f"{name}: rank {rank} has no fewer parameters than the dense layer of "
                f"{layer.in_features} x {layer.out_features}; choose a smaller one"
            )
        activation = (self.config.activation or "silu") if self.config.form == "cola" else None
        return TwoFactorLinear.Config(
            in_features=layer.in_features,
            out_features=layer.out_features,
            bias=layer.bias,
            param_init=layer.param_init,
            sharding_config=layer.sharding_config,
            rank=rank,
            activation=activation,
        )
