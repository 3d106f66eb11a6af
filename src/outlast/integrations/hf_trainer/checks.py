"""What of a `Trainer` and its arguments does not go with Outlast, said before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers
from packaging.version import Version

from outlast.errors import IntegrationError
from outlast.job.section import toml_value

if TYPE_CHECKING:
    from transformers import Trainer

    from outlast.job import CheckpointSection

_NEEDED = (
    "train",
    "training_step",
    "save_model",
    "_finalize_training",
    "_get_grad_norm",
    "evaluate",
    "get_batch_samples",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods of `Trainer` that are replaced or called."""

_TESTED = Version("5.23")

_DECIDED_BY_ARGUMENTS = {
    "every_steps": "save_strategy and save_steps say when to save",
    "keep": "save_total_limit says how many are kept",
    "keep_every": "save_total_limit says how many are kept",
    "keep_best": "metric_for_best_model and load_best_model_at_end say which is kept as the best",
    "mtbf_hours": "save_strategy and save_steps say when to save",
    "slowdown_budget": "save_strategy and save_steps say when to save",
    "longest_minutes": "save_strategy and save_steps say when to save",
    "when_busy": "save_strategy asks for a folder, which waits for the version before",
}
"""Keys of [checkpoint] -> whose business they are in a `Trainer`."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse a `Trainer` of another make.

    Raises:
        IntegrationError: When methods are missing that this version of transformers should have.
    """
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if not missing:
        return
    found = Version(transformers.__version__)
    if found.release[:2] == _TESTED.release[:2]:
        raise IntegrationError(
            f"a {type(trainer).__name__} has no {missing[0]}(): it is no transformers.Trainer"
        )
    age = "old" if found < _TESTED else "new"
    raise IntegrationError(
        f"transformers {found} is too {age}: its Trainer has no {missing[0]}(); Outlast works with "
        f"transformers {_TESTED}: pip install 'transformers~={_TESTED}.0'"
    )


def check_checkpoints(trainer: Trainer, settings: CheckpointSection) -> None:
    """Refuse what a store cannot keep the meaning of.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    arguments = trainer.args
    if trainer.is_deepspeed_enabled:
        raise IntegrationError(
            "add_checkpoints cannot save what DeepSpeed holds: use the checkpoint engine of "
            "outlast.integrations.deepspeed in its configuration"
        )
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        raise IntegrationError(
            "TrainingArguments.fsdp is FSDP1, which hides the parameters; set fsdp_config = "
            "{'version': 2}"
        )
    if arguments.push_to_hub and arguments.hub_strategy != "end":
        raise IntegrationError(
            f"TrainingArguments.hub_strategy = {arguments.hub_strategy.value!r} would push "
            "checkpoints, which are in a store that the hub cannot read; set hub_strategy='end'"
        )
    if arguments.save_on_each_node:
        raise IntegrationError(
            "TrainingArguments.save_on_each_node = True has no meaning for a store that all nodes "
            "write to together; leave it False, and for nodes' own disks set checkpoint.fast and "
            "checkpoint.fast_private"
        )
    for name, reason in _DECIDED_BY_ARGUMENTS.items():
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            raise IntegrationError(
                f"checkpoint.{name} = {toml_value(value)} has no effect in a Trainer: "
                f"TrainingArguments.{reason}; remove it"
            )


def check_stop(trainer: Trainer) -> None:
    """Refuse to stop in two ways at once, or where nothing could go on afterwards.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    if trainer.args.enable_jit_checkpoint:
        raise IntegrationError(
            "TrainingArguments.enable_jit_checkpoint = True handles SIGTERM, and so does add_stop; "
            "set it to False"
        )
    if trainer.args.save_only_model:
        raise IntegrationError(
            "TrainingArguments.save_only_model = True saves nothing that a stopped training could "
            "go on from; set it to False, or leave add_stop out"
        )
