"""Retention of versions, and the deletion of the others and of what killed saves left behind.

Replay logs lie beside the versions that they lead on from, in a folder of their own, ``replay``, in
the format of versions; those of no more use are deleted here, too. Needs no torch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.checkpoint.storage import LocalStorage, storage_of
from outlast.checkpoint.version import (
    SEAL,
    Seal,
    UnfinishedError,
    UnreadableError,
    Version,
    list_versions,
    load,
    seal_or_contents,
)
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents


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
        if self.best and not self.metric:
            raise CheckpointError(
                f"best = {self.best} needs the name of a metric to compare, e.g. metric='loss'"
            )


@dataclass(frozen=True)
class Known:
    """Facts of a complete version that retention looks at.

    Attributes:
        version: Which.
        kind: ``state`` or ``replay``.
        packs: Files that it needs.
        metrics: Figures by which versions are compared.
        world_size: How many ranks saved it.
    """

    version: Version
    kind: str
    packs: frozenset[str]
    metrics: dict[str, float]
    world_size: int = 1


def complete_versions(storage: Storage) -> list[Known]:
    """All complete versions, from old to new; the manifests of unsealed ones are read.

    Raises:
        UnreadableError: When the storage fails.
        OSError: When it cannot be listed.
    """
    found = (_known(storage, version, load, {}) for version in list_versions(storage))
    return [known for known in found if known is not None]


def survey(
    storage: Storage,
    versions: list[Version],
    read: Callable[[Storage, Version], Contents] = load,
    cache: dict[Version, Known] | None = None,
) -> tuple[list[Known], Version | None]:
    """The complete ones of `versions`, and the newest one of which the storage fails to say.

    Args:
        storage: The store.
        versions: All its versions, from old to new.
        read: Reads the manifests of an unsealed version, or raises CheckpointError; as `load`.
        cache: What is known of sealed versions from the last time, brought up to date.
    """
    cache = {} if cache is None else cache
    for gone in cache.keys() - set(versions):
        del cache[gone]
    known, unclear = [], None
    for version in versions:
        try:
            found = cache.get(version) or _known(storage, version, read, cache)
        except (UnreadableError, OSError):
            unclear = version
            continue
        if found is not None:
            known.append(found)
    return known, unclear


def _known(
    storage: Storage,
    version: Version,
    read: Callable[[Storage, Version], Contents],
    cache: dict[Version, Known],
) -> Known | None:
    found = seal_or_contents(storage, version, read)
    if found is None:
        return None
    known = Known(version, found.kind, frozenset(found.packs), found.metrics, found.world_size)
    # Without a seal, parts may still come, and need more packs.
    if isinstance(found, Seal):
        cache[version] = known
    return known


def to_keep(known: list[Known], policy: Retention) -> set[Version]:
    """The versions that stay; `known` runs from old to new."""
    kept = {known_item.version for known_item in known[-policy.keep :]}
    if policy.every:
        kept |= {
            known_item.version
            for known_item in known
            if known_item.version.step % policy.every == 0
        }
    if policy.best:
        rated = [known_item for known_item in known if policy.metric in known_item.metrics]
        sign = 1.0 if policy.mode == "min" else -1.0
        rated.sort(key=lambda item: (sign * item.metrics[policy.metric], -item.version.step))
        kept |= {known.version for known in rated[: policy.best]}
    return kept


def prune(
    storage: Storage,
    policy: Retention,
    *,
    protected: Collection[Version] = (),
    read: Callable[[Storage, Version], Contents] = load,
    world_size: int | None = None,
    cache: dict[Version, Known] | None = None,
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
    ours = [name for name in known if world_size in (None, name.world_size)]
    if not ours:
        return []
    newest = ours[-1].version
    kept = to_keep(known, policy) | to_keep(ours, policy) | set(protected)
    kept |= {
        version
        for version in versions
        if version >= newest or (unclear is not None and version <= unclear)
    }
    packs = {pack for name in known if name.version in kept for pack in name.packs}
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


_FOLDER = "replay"


def logs_of(storage: Storage) -> Storage:
    """Storage of a store's replay logs: below its versions, since step and log must not meet.

    Args:
        storage: The store.
    """
    return storage_of(f"{storage.location}/{_FOLDER}")


def states_of(logs: Storage) -> Storage:
    """The store whose versions the logs in `logs` start from: the inverse of `logs_of`."""
    if isinstance(logs, LocalStorage):
        return LocalStorage(logs.root.absolute().parent)
    return storage_of(logs.location.rpartition("/")[0])


def leading_on(
    storage: Storage, base: Version, read: Callable[[Version], Contents] | None = None
) -> tuple[list[Version], str]:
    """The complete logs that lead on from `base` without a gap, and why newer ones do not.

    A newest log that was cut short is passed over without a word: its step was not yet safe.

    Args:
        storage: The storage of the logs alone.
        base: A version of the state.
        read: Reads the manifests of a complete log, or raises CheckpointError; as `load`.
    """
    later = [version for version in list_versions(storage) if version > base]
    run: list[Version] = []
    cause = ""
    for log in later:
        expected = Version(base.session, base.step + len(run) + 1)
        if log != expected:
            cause = f"that of step {expected.step} is missing"
            if log.session != base.session:
                cause = "the version that they start from cannot be used"
            break
        if problem := _unusable(storage, log, read):
            cause = problem if log != later[-1] else ""
            break
        run.append(log)
    rest = later[len(run) :]
    if not cause:
        return run, ""
    steps = f"step {rest[0].step}"
    if len(rest) > 1:
        steps = f"steps {rest[0].step} to {rest[-1].step}"
    return run, f"the replay logs of {steps} cannot be used: {cause}"


def _unusable(storage: Storage, log: Version, read: Callable[[Version], Contents] | None) -> str:
    """Why a log was never published; empty when it was, even if it is damaged."""
    if SEAL not in storage.files(log.folder):
        try:
            _ = load(storage, log) if read is None else read(log)
        except UnfinishedError:
            return f"that of step {log.step} is incomplete"
        except CheckpointError as error:
            return str(error)
    return ""


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
    needed = min(newest, known[-1].version) if known else newest
    if unclear is not None and unclear >= needed:
        return
    packs = {pack for name in known if name.version >= needed for pack in name.packs}
    for version in versions:
        if version < needed:
            delete(storage, version, storage.files(version.folder), packs)
