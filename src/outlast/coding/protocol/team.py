"""Processes that compute one replica together, and follow one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


class Team:
    """The processes of one replica: a process alone, or a sharded replica's.

    Args:
        group: The replica's processes; None for a process alone.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.leads = self.rank == 0

    def told(self, answer: Callable[[], Any]) -> Any:
        """What the leader's `answer` is; the others wait for it and do not ask themselves.

        Raises:
            Exception: On all of them, what the leader's `answer` raises.
        """
        if self.size == 1:
            return answer()
        box: list[Any] = [None]
        if self.leads:
            try:
                box = [answer()]
            except Exception as error:
                box = [error]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]
