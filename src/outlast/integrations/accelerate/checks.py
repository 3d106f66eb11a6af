"""Which accelerators can be saved to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate import DistributedType

from outlast.errors import IntegrationError

if TYPE_CHECKING:
    from accelerate import Accelerator


def check_savable(accelerator: Accelerator) -> None:
    """Refuse what a store cannot hold.

    Raises:
        IntegrationError: In one sentence.
    """
    if not accelerator._optimizers:
        raise IntegrationError(
            "add_checkpoints counts the steps of a prepared optimizer, and there is none; call it "
            "after accelerator.prepare(...)"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise IntegrationError(
            f"add_checkpoints cannot save what {kind.value} holds; of the Accelerator's engines, "
            "DDP and FSDP2 go with a store"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise IntegrationError("FSDP1 hides the parameters; set fsdp_version=2")
    if accelerator.dataloader_config.use_stateful_dataloader:
        raise IntegrationError(
            "DataLoaderConfiguration.use_stateful_dataloader = True is not kept in a store; set it "
            "to False and go on with accelerator.skip_first_batches"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise IntegrationError(
            "ProjectConfiguration.save_on_each_node = True has no meaning for a store that all "
            "nodes write to together; leave it False"
        )
