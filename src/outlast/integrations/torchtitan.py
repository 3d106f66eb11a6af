"""Outlast inside torchtitan 0.3: checkpoints, guard, energy and records, structured layers.

def my_run() -> Trainer.Config:
    return use_outlast(llama3_debugmodel(), "job.toml")

`use_outlast` changes a recipe of any model; `OutlastTrainer`, `OutlastCheckpointManager.Config` and
`TensorizeConverter.Config` stand in recipes of one's own.

`OutlastTrainer` does what torchtitan's own `Trainer` does, and drives a runtime beside it: guard,
records with energy and memory.

`TensorizeConverter` changes the tree of a model's settings before the model is built, as
torchtitan's own converters do. A layer becomes two of torchtitan's linear layers, so that FSDP2,
tensor parallelism, activation checkpointing and compilation treat the factors like any other layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import logging
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from outlast import cluster
from outlast.errors import IntegrationError, TensorizeError
from outlast.integrations import in_folder, require, unfollowed
from outlast.job import LoopJob, load_loop_job
from outlast.job.section import toml_value
from outlast.runtime.engine import Runtime, StepResult
from outlast.runtime.place import ranks_here
from outlast.runtime.recording import LoopFacts
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.initialize import activation_gain, core_stds
from outlast.tensorize.low_rank import low_rank_network
from outlast.tensorize.policy import LayerShape, resolved_rank
from outlast.tensorize.shapes import form_named

require("torchtitan", "0.3", "0.4")

import spmd_types as spmd  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.decoder_sharding import dense_param_placement  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.model import ModelConfigConverter  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from outlast.integrations.torchtitan_checkpoints import OutlastCheckpointManager  # noqa: E402

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

__all__ = ["OutlastCheckpointManager", "OutlastTrainer", "TensorizeConverter", "use_outlast"]

_DEGREES = {
    "pipeline": "pp",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "context": "cp",
    "tensor": "tp",
    "expert": "ep",
}
"""Name of an axis in the records -> in torchtitan's `ParallelDims`."""

_PROBED_ROWS = 256
"""Rows of a weight that are initialised to find their standard deviation."""

_logger = logging.getLogger(__name__)


def _facts_of(trainer: Trainer) -> LoopFacts:
    training, dims = trainer.config.training, trainer.parallel_dims
    replicas = dims.dp_replicate * dims.dp_shard
    samples = training.local_batch_size * replicas * trainer.gradient_accumulation_steps
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    return LoopFacts(
        framework="torchtitan",
        steps=training.steps,
        samples_per_step=samples,
        tokens_per_step=samples * training.seq_len,
        # A rank of a pipeline has a part of them.
        parameters=0 if dims.pp_enabled else sum(parameter.numel() for parameter in parameters),
        flops_per_token=float(trainer.metrics_processor.num_flops_per_token),
        parallel={name: getattr(dims, own) for name, own in _DEGREES.items()},
        versions={"torchtitan": version("torchtitan")},
    )


def job_of(config: OutlastTrainer.Config) -> LoopJob:
    """The settings of what Outlast does beside a training, with its dump folder as the run's.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When one has no effect, or does not go with the recipe.
    """
    path = Path(config.outlast_job) if config.outlast_job else None
    job = load_loop_job(path, config.outlast_settings)
    for name, value in unfollowed(job.checkpoint):
        raise IntegrationError(
            f"checkpoint.{name} = {toml_value(value)} in a job has no effect in torchtitan: the "
            "recipe's own checkpoint settings count; remove it"
        )
    _check_guard(config, job)
    names = {"setting": "dump_folder", "framework": "torchtitan", "owner": "the recipe's "}
    return in_folder(job, config.dump_folder, **names)


def _check_guard(config: OutlastTrainer.Config, job: LoopJob) -> None:
    """Refuse a guard where its checks would not run.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    policy = job.guard.policy
    if policy == "off":
        return
    if (stages := config.parallelism.pipeline_parallel_degree) > 1:
        raise IntegrationError(
            f"parallelism.pipeline_parallel_degree = {stages} does not go with guard.policy = "
            f'"{policy}": in torchtitan the guard knows no pipelines; set it to "off"'
        )
    if policy == "light" and not job.guard.modules:
        return
    what = f'policy = "{policy}"' if policy != "light" else "modules"
    if isinstance(config.activation_checkpoint, SelectiveAC.Config):
        raise IntegrationError(
            f"guard.{what} does not go with activation_checkpoint = SelectiveAC: torch counts the "
            "operations of both passes there, and the checks are among them; set it to "
            "FullAC.Config() or None"
        )
    if not config.training.disable_cuda_graphs:
        raise IntegrationError(
            f"guard.{what} needs training.disable_cuda_graphs = True: passes that are replayed "
            "from a CUDA graph run without their checks"
        )


class OutlastTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose steps are guarded, recorded and metered; `use_outlast` gives one.

    A trainer of one's own derives from it in place of `Trainer`.

    Raises:
        JobError: When a setting of the job is wrong.
        IntegrationError: When one does not go with the recipe.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """A recipe, and where the settings of what Outlast does beside it are."""

        outlast_job: str = ""
        """A TOML file with the sections [guard], [recover], [energy] and [log]; empty: defaults."""

        outlast_settings: list[str] = field(default_factory=list)
        """Overrides of the form "section.key=value"."""

    ntokens_seen: int

    def __init__(self, config: Config) -> None:
        # A wrong setting ends it before anything is built.
        self._job = job_of(config)
        self._runtime: Runtime | None = None
        self._has_begun = False
        self._result = StepResult(0)
        self._parts = self._tokens_before = 0
        super().__init__(config)

    def train(self) -> None:
        """Train to the last step; see `Trainer.train`."""
        manager, runtime = self.checkpointer, Runtime(ranks_here(), chain=cluster)
        ours = isinstance(manager, OutlastCheckpointManager) and manager.enable
        if ours:
            runtime, manager.job = manager.runtime, self._job
        self._runtime, self._has_begun = runtime, False
        runtime.open_records(self._job, self.device, _facts_of(self))
        closing = contextlib.closing(manager) if ours else runtime
        with closing, contextlib.ExitStack() as undo:
            undo.callback(setattr, self, "_runtime", None)
            self._time(undo, manager, "save", partial(runtime.watch, "checkpoint"))
            if hasattr(self, "validator"):
                self._time(undo, self.validator, "validate", runtime.evaluating)
            self._replace(undo, self.metrics_processor, "log", self._note_figures)
            super().train()
            # The loop has come to its end; what the guard's last checks find is told.
            runtime.end_steps(runtime.step)
            manager.maybe_wait_for_saving()

    def should_continue_training(self) -> bool:
        """True if a step is to follow; asked before each, the first time with everything loaded."""
        runtime = self._runtime
        if runtime is not None and not self._has_begun:
            self._has_begun = True
            guard, seed = self._job.guard, self._job.run.seed
            runtime.install_guard(guard, seed, self.model_parts[0], [*self.optimizers])
            runtime.begin(self.step)
        return bool(super().should_continue_training())

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """The batches; waiting for them is told apart in the records."""
        batches = super().batch_generator(data_iterable)
        while True:
            with self._watch("data"):
                batch = next(batches)
            yield batch

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step, guarded and recorded."""
        self._result.learning_rate = self.optimizers.optimizers[0].param_groups[0]["lr"]
        with self._watch("compute"):
            super().train_step(data_iterator)
        result, self._result = self._result, StepResult(0)
        result.step = self.step
        if self._runtime is not None:
            self._runtime.record(result)

    def forward_backward_step(self, **part: Any) -> Tensor:
        """The passes of one of a step's parts, and again where their numbers are wrong."""
        own = super().forward_backward_step
        if self._runtime is None or self._runtime.guard is None:
            loss: Tensor = own(**part)
            return loss
        if self._parts == 0:
            self._tokens_before = self.ntokens_seen
        self._parts = (self._parts + 1) % self.gradient_accumulation_steps

        def passes(_: bool) -> Tensor:
            # A CUDA graph writes the next loss over this one.
            loss: Tensor = own(**part).detach().clone()
            return loss

        def begin_again() -> None:
            # Where CUDA graphs replay the passes, the gradients must stay where they are.
            self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
            self.ntokens_seen = self._tokens_before

        return self._runtime.micro_batch(passes, last=self._parts == 0, begin_again=begin_again)

    def _note_figures(
        self,
        own: Callable[..., None],
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        *more: Any,
        **options: Any,
    ) -> None:
        """The log of torchtitan itself of a step: its figures are those of all ranks."""
        own(step, global_avg_loss, global_max_loss, grad_norm, *more, **options)
        if not self.parallel_dims.pp_enabled:
            # The first stage of a pipeline, whose rank records, knows no loss.
            self._result.loss = global_avg_loss
        self._result.gradient_norm = grad_norm

    def _watch(self, purpose: str) -> contextlib.AbstractContextManager[Any]:
        """A context whose time counts for `purpose`."""
        return contextlib.nullcontext() if self._runtime is None else self._runtime.watch(purpose)

    def _time(
        self,
        undo: contextlib.ExitStack,
        owner: Any,
        name: str,
        timing: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Let a method run in a context of `timing`."""

        def timed(own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with timing():
                return own(*arguments, **options)

        self._replace(undo, owner, name, timed)

    def _replace(
        self, undo: contextlib.ExitStack, owner: Any, name: str, wrapped: Callable[..., Any]
    ) -> None:
        """Let `wrapped`, which is given the method as its first argument, stand in for it."""
        setattr(owner, name, partial(wrapped, getattr(owner, name)))
        undo.callback(delattr, owner, name)


def use_outlast(
    config: Any,
    job: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Let a recipe's checkpoints go into a store; its settings of them keep their meaning.

    With a job or overrides its steps are guarded, metered and recorded, too.

    Args:
        config: A `Trainer.Config`.
        job: A TOML file with the sections [guard], [recover], [energy] and [log], each of which may
            be missing.
        overrides: Of the job's settings, or of the defaults: "section.key=value". A recipe that has
            a job or overrides already keeps what is not given.
        settings: Of `OutlastCheckpointManager.Config`, instead of the recipe's own; for example
            ``enable=True``, which most recipes leave to the command line.

    Returns:
        The recipe: the same `config`, or an `OutlastTrainer.Config` in its place.

    Raises:
        IntegrationError: When a setting is unknown, the recipe's manager has one that a store
            cannot follow, or its trainer has steps of its own.
    """
    known = {field.name for field in dataclasses.fields(OutlastCheckpointManager.Config)}
    if unknown := sorted(settings.keys() - known):
        raise IntegrationError(
            f"{unknown[0]} = {settings[unknown[0]]!r} is no setting of OutlastCheckpointManager; "
            f"there are {', '.join(sorted(known))}"
        )
    if job is not None or overrides:
        # The same recipe for an OutlastTrainer; what is not given stays as it is.
        if type(config) is Trainer.Config:
            recipe = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
            config = OutlastTrainer.Config(**recipe)
        elif not isinstance(config, OutlastTrainer.Config):
            raise IntegrationError(
                f"the recipe is a {type(config).__qualname__}, whose trainer has steps of its own; "
                "derive that trainer and its Config from OutlastTrainer, or leave out job and "
                "overrides"
            )
        config.outlast_job = config.outlast_job if job is None else str(job)
        config.outlast_settings = [*overrides] or config.outlast_settings
    before = config.checkpoint
    given = {}
    for setting in dataclasses.fields(before):
        value = getattr(before, setting.name)
        if setting.name in known:
            given[setting.name] = value
        elif value != _default(setting):
            raise IntegrationError(
                f"checkpoint.{setting.name} = {value!r} of {type(before).__qualname__} has no "
                "counterpart in a store; leave it at its default"
            )
    config.checkpoint = OutlastCheckpointManager.Config(**given | settings)
    return config


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


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
