"""Schedules of `torch.distributed.pipelining`: whatever torch runs can be planned.

A torch schedule has an order of actions for each rank (`pipeline_order`), each with a stage, a kind
and a micro-batch. Only these attributes are read, so torch itself is not imported.

Transfers are left out, with or without communication in the order: `with_transfers` puts one
wherever a stage waits for another device. So are UNSHARD, RESHARD and REDUCE_GRAD, which the tail
or measured operation times stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.energy.schedule.linked import GRADIENT_PHASES, Work, linked
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.energy.schedule.dag import Schedule

_PHASES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
_OVERLAPPED = "OVERLAP_F_B"
_SKIPPED = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}


def from_torch(pipeline: Any) -> Schedule:
    """The graph of a torch pipeline schedule.

    A forward and a backward that torch overlaps on one rank (DualPipeV) become one after the other.

    Args:
        pipeline: A schedule of `torch.distributed.pipelining` (1F1B, GPipe, interleaved, zero
            bubble, ZBV, one's own), or its `pipeline_order`: rank -> actions, with or without
            communication.

    Raises:
        EnergyError: When it has no order, or the order is no training step (see `linked`).
    """
    order = _order_of(pipeline)
    ranks = sorted(order)
    if not ranks or ranks != list(range(len(ranks))):
        raise EnergyError(f"the pipeline order has the ranks {ranks}; it must have 0, 1, 2, ...")
    works = [[work for action in order[rank] for work in _works(action)] for rank in ranks]
    return linked([_counted_from_0(work) for work in works])


def _order_of(pipeline: Any) -> Mapping[int, Any]:
    order = pipeline
    if not isinstance(pipeline, Mapping):
        order = getattr(pipeline, "pipeline_order", None)
        # Schedules with one stage per rank make their order when asked.
        if order is None and hasattr(pipeline, "_get_pipeline_order"):
            order = pipeline._get_pipeline_order()
    if not isinstance(order, Mapping):
        raise EnergyError(
            f"{type(pipeline).__name__} has no pipeline_order: give a schedule of "
            "torch.distributed.pipelining that trains, or rank -> actions"
        )
    return order


def _counted_from_0(works: list[Work]) -> list[Work]:
    """Put right that torch 2.13's order of 1F1B (not what it runs) counts the last stage from 1."""
    forwards = {work.microbatch for work in works if work.phase == "forward"}
    gradients = {work.microbatch for work in works if work.phase in GRADIENT_PHASES}
    if 0 in forwards or forwards != {batch + 1 for batch in gradients}:
        return works
    return [work._replace(microbatch=work.microbatch - (work.phase == "forward")) for work in works]


def _works(action: Any) -> Iterator[Work]:
    if action is None:  # A bubble: the edges make it.
        return
    try:
        kind = str(action.computation_type.value)
        stage, batch = action.stage_index, action.microbatch_index
    except AttributeError as error:
        raise EnergyError(
            f"{action!r} in the pipeline order is no action of torch.distributed.pipelining"
        ) from error
    if kind == _OVERLAPPED:
        for sub_action in action.sub_actions or ():
            yield from _works(sub_action)
    elif kind in _PHASES:
        yield Work(int(stage), _PHASES[kind], int(batch))
    elif kind not in _SKIPPED:
        raise EnergyError(
            f"{action} in the pipeline order has the unknown kind {kind}; known are "
            f"{', '.join([*_PHASES, _OVERLAPPED, *sorted(_SKIPPED)])}"
        )
