"""What speaks against replacing a layer at all."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.distributed.group import Group
from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        if any(target.transposed for target in targets) and len(kinds) > 1:
            raise TensorizeError(
                f"{names} share a weight of which one is transposed, and cannot share factors: "
                "exclude them"
            )
        if len(set(mine)) > 1:
            raise TensorizeError(
                f"{names} share a weight, so all of them must become the same or none: match or "
                "exclude them together, or untie them (tie_word_embeddings = False)"
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
    quantized = is_traceable_wrapper_subclass(target.parameter)
    if quantized or not target.parameter.is_floating_point():
        kind = type(target.parameter.data).__name__ if quantized else target.parameter.dtype
        raise TensorizeError(
            f"{target.name} has a weight of {kind}, which cannot be learned: exclude it"
        )
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        raise TensorizeError(
            f"{target.name} has hooks, which would be lost: register them after tensorize"
        )
    if target.is_embedding and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        raise TensorizeError(
            f"{target.name} has max_norm, sparse or scale_grad_by_freq, which embeddings of "
            "factors have not: exclude it"
        )


def check_ranks_agree(decided: Mapping[str, str]) -> None:
    """Refuse to go on where the processes of a run would replace the same layer differently.

    Collective, if there is a process group: first of a digest, and of all only if these differ.
    Layers that other processes do not have, as in a pipeline, need not agree.

    Args:
        decided: Name of every layer that was looked at -> what becomes of it.

    Raises:
        TensorizeError: Two processes differ, on all of them.
    """
    mine = repr(sorted(decided.items())).encode()
    group = Group()
    if len(set(group.gather(hashlib.blake2b(mine).hexdigest()))) == 1:
        return
    every = group.gather(dict(decided))
    for (one, first), (other, second) in itertools.combinations(enumerate(every), 2):
        for name in first:
            if first[name] != second.get(name, first[name]):
                raise TensorizeError(
                    f"{name} would become {first[name]} on rank {one} and {second[name]} on rank "
                    f"{other}: call tensorize alike on all ranks, and with force = True where "
                    "machines differ in what is faster"
                )
