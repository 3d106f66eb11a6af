"""Rows that are alike: the groups by which errors are counted and rows are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.calibration.rows import Row

OTHERS = "*"
"""Stands for every group that no row was measured of."""


def interval_group(framework: str, chip: str, cluster: str = "", *, mixture: bool = False) -> str:
    """The name under which errors of a framework on a chip of a cluster are collected.

    Another cluster with the same framework and chip has errors of its own: its network, hosts and
    versions differ. How far a prediction is off differs as much between dense models and mixtures
    of experts: kernels and exchanges of experts change from release to release.

    Args:
        framework: As calibrations count.
        chip: Kind of the devices.
        cluster: Its name; empty for the beginning that the names of all clusters share.
        mixture: A mixture of experts.
    """
    name = f"{framework} on {chip} at {cluster}"
    return f"mixtures, {name}" if mixture else name


def interval_groups(rows: Sequence[Row]) -> tuple[str, ...]:
    """`interval_group` of each row."""
    return tuple(
        interval_group(row.framework, row.chip, row.cluster.name, mixture=row.model.experts > 1)
        for row in rows
    )


def folds(keys: Sequence[str], count: int, seed: int = 0) -> NDArray[np.intp]:
    """Folds for cross-validation that never split a key.

    Keys are ordered by a hash of the seed and themselves, not by their place in the file: sorted
    files leak through ties. They are dealt out so that the folds have nearly equal numbers of rows.

    Args:
        keys: (n,) of the rows, `Row.key`.
        count: Folds, at least 2.
        seed: Of the order.

    Returns:
        (n,) number of each row's fold, from 0.

    Raises:
        PlanError: Fewer keys than folds.
    """
    members: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    if count < 2 or len(members) < count:
        raise PlanError(
            f"folds = {count}: give at least 2 and at most one per configuration "
            f"(there are {len(members)})"
        )
    found = np.zeros(len(keys), np.intp)
    filled = [0] * count
    for key in sorted(members, key=lambda member: (-len(members[member]), _hash(seed, member))):
        fold = min(range(count), key=lambda index: (filled[index], index))
        found[members[key]] = fold
        filled[fold] += len(members[key])
    return found


def _hash(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}:{key}".encode()).digest()
