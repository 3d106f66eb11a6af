"""Which versions stay, and the deletion of the others and of what killed saves left behind."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.checkpoint.format.version import SEAL, Version, list_versions, load, read_seal
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Contents


@dataclass(frozen=True)
class Retention:
    """Which versions of a store stay.

    Attributes:
        keep: The newest ones.
        every: Also all whose step is a multiple of this, for ever; 0: none.
        best: Also this many with the best figure; 0: none.
        metric: Name of the figure, as given to `save_async`.
        mode: Whether a small (``min``) or a large (``max``) figure is good.
    """

    keep: int = 3
    every: int = 0
    best: int = 0
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse what would keep nothing or cannot be decided."""
        if self.keep < 1:
            raise CheckpointError(f"keep = {self.keep} keeps no checkpoint; it must be at least 1")
        if self.every < 0 or self.best < 0:
            raise CheckpointError(
                f"every = {self.every} and best = {self.best} must be 0 (none) or larger"
            )
        if self.best and not self.metric:
            raise CheckpointError(
                f"best = {self.best} needs the name of a metric to compare, e.g. metric='loss'"
            )


@dataclass(frozen=True)
class Known:
    """What retention knows of a complete version."""

    version: Version
    kind: str
    packs: frozenset[str]
    metrics: dict[str, float]


def complete_versions(
    storage: Storage, read: Callable[[Version], Contents] | None = None
) -> list[Known]:
    """All complete versions, from old to new; the manifests of unsealed ones are read.

    Args:
        storage: The store.
        read: Reads the manifests of a complete version, or raises CheckpointError; as `load`.
    """
    found = []
    for version in list_versions(storage):
        known = _known(storage, version, read)
        if known is not None:
            found.append(known)
    return found


def _known(
    storage: Storage, version: Version, read: Callable[[Version], Contents] | None
) -> Known | None:
    seal = read_seal(storage, version)
    if seal is not None:
        return Known(version, seal.kind, frozenset(seal.packs), seal.metrics)
    try:
        contents = load(storage, version) if read is None else read(version)
    except CheckpointError:
        return None
    return Known(version, contents.kind, frozenset(contents.packs), contents.metrics)


def to_keep(known: list[Known], policy: Retention) -> set[Version]:
    """The versions that stay; `known` runs from old to new."""
    kept = {each.version for each in known[-policy.keep :]}
    if policy.every:
        kept |= {each.version for each in known if each.version.step % policy.every == 0}
    if policy.best:
        rated = [each for each in known if policy.metric in each.metrics]
        sign = 1.0 if policy.mode == "min" else -1.0
        rated.sort(key=lambda each: (sign * each.metrics[policy.metric], -each.version.step))
        kept |= {each.version for each in rated[: policy.best]}
    return kept


def prune(
    storage: Storage,
    policy: Retention,
    *,
    protected: Collection[Version] = (),
    read: Callable[[Version], Contents] | None = None,
    dry_run: bool = False,
) -> list[Version]:
    """Delete the versions that need not stay, and the remains of saves that were cut short.

    Nothing newer than the newest complete version is touched: it may be under way. Chunks that a
    kept version refers to stay, whatever version they were first stored with.

    Args:
        storage: The store.
        policy: What stays.
        protected: Versions that stay too, because they are being copied.
        read: See `complete_versions`.
        dry_run: Delete nothing.

    Returns:
        The versions deleted (or that would be), incomplete ones included.
    """
    known = complete_versions(storage, read)
    if not known:
        return []
    kept = to_keep(known, policy).union(protected)
    packs = {pack for each in known if each.version in kept for pack in each.packs}
    newest = known[-1].version
    deleted = []
    for version in list_versions(storage):
        if version in kept or version >= newest:
            continue
        files = storage.files(version.folder)
        if any(name.endswith(".json") for name in files):
            deleted.append(version)
        if not dry_run:
            delete(storage, version, files, packs)
    return deleted


def delete(storage: Storage, version: Version, files: dict[str, int], packs: set[str]) -> None:
    """Delete a version but for `packs`; what cannot be deleted now waits for next time.

    The manifests go first, so that what a cut deletion leaves is no version.

    Args:
        storage: The store.
        version: Which.
        files: The files in its folder.
        packs: Files that other versions need.
    """
    names = [f"{version.folder}/{name}" for name in files]
    manifests = sorted(name for name in names if name.endswith(".json"))
    manifests.sort(key=lambda name: not name.endswith(SEAL))
    needed = [name for name in names if name in packs]
    with contextlib.suppress(OSError):
        for name in manifests:
            storage.remove(name)
        if needed:
            for name in names:
                if name not in packs and name not in manifests:
                    storage.remove(name)
        else:
            storage.remove_folder(version.folder)
