"""Versions and replay logs of a store that stay, and the deletion of the others. Needs no torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.checkpoint.storage import UnreadableError
from outlast.checkpoint.version import SEAL, find_seal, list_versions, load
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents, Seal, Version


@dataclass(frozen=True)
class Retention:
    """Rule for the versions of a store that stay.

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
        if self.mode not in ("min", "max"):
            raise CheckpointError(f'mode = "{self.mode}" must be min or max')
        if self.best and not self.metric:
            raise CheckpointError(
                f"best = {self.best} needs the name of a metric to compare, e.g. metric='loss'"
            )


def complete_versions(storage: Storage) -> dict[Version, Seal]:
    """All complete versions and their seals, from old to new; unsealed ones' manifests are read.

    Raises:
        UnreadableError: When the storage fails.
        OSError: When it cannot be listed.
    """
    found = {version: find_seal(storage, version, load) for version in list_versions(storage)}
    return {version: seal[0] for version, seal in found.items() if seal is not None}


def survey(
    storage: Storage,
    versions: list[Version],
    read: Callable[[Storage, Version], Contents] = load,
    cache: dict[Version, Seal] | None = None,
) -> tuple[dict[Version, Seal], Version | None]:
    """The complete ones of `versions`, and the newest one of which the storage fails to say.

    Args:
        storage: The store.
        versions: All its versions, from old to new.
        read: Reads the manifests of an unsealed version, or raises CheckpointError; as `load`.
        cache: The seals that are known from the last time, brought up to date.
    """
    cache = {} if cache is None else cache
    for gone in cache.keys() - set(versions):
        del cache[gone]
    known, unclear = {}, None
    for version in versions:
        if version in cache:
            known[version] = cache[version]
            continue
        try:
            found = find_seal(storage, version, read)
        except (UnreadableError, OSError):
            unclear = version
            continue
        if found is not None:
            known[version], is_stored = found
            # Without a seal, parts may still come, and need more packs.
            if is_stored:
                cache[version] = known[version]
    return known, unclear


def to_keep(known: dict[Version, Seal], policy: Retention) -> set[Version]:
    """The versions that stay; `known` runs from old to new."""
    kept = set([*known][-policy.keep :])
    if policy.every:
        kept |= {version for version in known if version.step % policy.every == 0}
    if policy.best:
        sign = 1.0 if policy.mode == "min" else -1.0
        rated = [
            (sign * seal.metrics[policy.metric], -version.step, number, version)
            for number, (version, seal) in enumerate(known.items())
            if policy.metric in seal.metrics
        ]
        kept |= {version for *_, version in sorted(rated)[: policy.best]}
    return kept


def prune(
    storage: Storage,
    policy: Retention,
    *,
    protected: Collection[Version] = (),
    damaged: Collection[Version] = (),
    read: Callable[[Storage, Version], Contents] = load,
    world_size: int | None = None,
    cache: dict[Version, Seal] | None = None,
    dry_run: bool = False,
) -> list[Version]:
    """Delete the versions that need not stay, and the remains of saves that were cut short.

    Nothing newer than the newest complete version is touched: it may be under way. Chunks that a
    kept version refers to stay, whatever version they were first stored with. Where the storage
    fails to say what a version needs, that one and all older ones stay until it does.

    Args:
        storage: The store.
        policy: What stays.
        protected: Versions that stay too, because they are being copied.
        damaged: Versions that a restore has passed over. They count for nothing, and stay until
            as many intact ones as `policy` keeps are newer.
        read: See `survey`.
        world_size: Where only as many ranks as saved a version can restore it, how many there are
            now: what others saved goes only when a newer version of these ranks is complete.
        cache: See `survey`.
        dry_run: Delete nothing.

    Returns:
        The versions deleted (or that would be), incomplete ones included.
    """
    versions = list_versions(storage)
    cache = {} if cache is None else cache
    known, unclear = survey(storage, versions, read, cache)
    intact = {version: seal for version, seal in known.items() if version not in damaged}
    ours = {
        version: seal for version, seal in intact.items() if world_size in (None, seal.world_size)
    }
    if not ours:
        return []
    newest = max(ours)
    kept = to_keep(intact, policy) | to_keep(ours, policy) | set(protected)
    kept |= {bad for bad in damaged if sum(version > bad for version in ours) < policy.keep}
    kept |= {
        version
        for version in versions
        if version >= newest or (unclear is not None and version <= unclear)
    }
    packs = {pack for version in known if version in kept for pack in known[version].packs}
    deleted = []
    for version in versions:
        if version in kept:
            continue
        files = storage.files(version.folder)
        if any(name.endswith(".json") for name in files):
            deleted.append(version)
        if not dry_run:
            # Its folder may stay, for packs that others need.
            cache.pop(version, None)
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


def prune_logs(storage: Storage, newest: Version) -> None:
    """Delete the replay logs that lead to `newest`, the newest complete version of the state.

    The newest complete log stays, and all after it, which may be under way.

    Args:
        storage: The storage of the logs alone.
        newest: The version that logs have to come after to be of use.
    """
    versions = list_versions(storage)
    known, unclear = survey(storage, versions)
    # What comes next may refer to the packs of the last one.
    needed = min(newest, max(known, default=newest))
    if unclear is not None and unclear >= needed:
        return
    packs = {pack for version, seal in known.items() if version >= needed for pack in seal.packs}
    for version in versions:
        if version < needed:
            delete(storage, version, storage.files(version.folder), packs)
