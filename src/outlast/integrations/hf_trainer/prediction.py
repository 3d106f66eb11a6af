"""What a `Trainer`'s run is expected to need, from its model's config and its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.plan import Configuration, Training, cluster_of, predict, transformer_of
from outlast.plan.cluster_file import this_cluster
from outlast.plan.prediction import as_record

if TYPE_CHECKING:
    from transformers import Trainer

    from outlast.records import Predicted


def predicted(trainer: Trainer, sequence: int, cluster: str | None = None) -> Predicted:
    """The prediction, for ``add_records(trainer, prediction=predicted(trainer, 2048))``.

    Args:
        trainer: Of a decoder-only language model, data parallel or FSDP2.
        sequence: Tokens of one sample.
        cluster: Name or file of a cluster; None: this machine.

    Raises:
        PlanError: When the model or the machine is not known.
    """
    arguments = trainer.args
    ranks = max(1, arguments.world_size)
    batch = trainer.get_total_train_batch_size(arguments)
    run = Configuration(
        data=ranks,
        sharding="parameters" if trainer.is_fsdp_enabled else "none",
        sequence=sequence,
        micro_batch=arguments.per_device_train_batch_size,
        batch=batch,
        recompute="full" if arguments.activation_checkpointing else "none",
        precision="bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
    )
    training = Training(
        model=transformer_of(trainer.model.config.to_dict()),
        run=run,
        tokens=float(max(trainer.args.max_steps, 1) * batch * sequence),
    )
    place = this_cluster(ranks) if cluster is None else cluster_of(cluster)
    return as_record(predict(training, place), "published runs")
