"""What speaks against replacing a layer at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from outlast.tensorize.policy import Selection, Target


def check_sharing(selection: Selection) -> None:
    """Refuse to replace some of the layers that share a weight.

    Raises:
        TensorizeError: See above.
    """
    chosen = {id(target.module): choice for target, choice in selection.chosen}
    sharing: dict[int, list[Target]] = {}
    for target in selection.targets:
        sharing.setdefault(id(target.parameter), []).append(target)
    for targets in sharing.values():
        mine = [chosen.get(id(target.module)) for target in targets]
        if len(targets) == 1 or not any(mine):
            continue
        names = " and ".join(target.name for target in targets)
        kinds = {(target.is_embedding, target.transposed) for target in targets}
        if len(kinds) > 1:
            raise TensorizeError(
                f"{names} share a weight and cannot share factors: untie them "
                "(tie_word_embeddings = False), or exclude them"
            )
        if len(set(mine)) > 1:
            raise TensorizeError(
                f"{names} share a weight, so all of them must become the same or none: match or "
                "exclude them together"
            )


def check_target(target: Target) -> None:
    """Refuse layers whose replacement would lose something.

    Raises:
        TensorizeError: The layer is sharded, cannot learn, has hooks, or does what embeddings of
            factors do not.
    """
    module = target.module
    if isinstance(target.parameter, DTensor):
        raise TensorizeError(
            f"{target.name} is sharded already: call tensorize before fully_shard and "
            "parallelize_module"
        )
    if not target.parameter.is_floating_point():
        raise TensorizeError(
            f"{target.name} has a weight of {target.parameter.dtype}, which cannot be learned: "
            "exclude it"
        )
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks):
        raise TensorizeError(
            f"{target.name} has hooks, which would be lost: register them after tensorize"
        )
    if target.is_embedding and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        raise TensorizeError(
            f"{target.name} has max_norm, sparse or scale_grad_by_freq, which embeddings of "
            "factors have not: exclude it"
        )
