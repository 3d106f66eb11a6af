"""Replay logs beside the versions that they lead on from: which are of use, and which are not.

They lie in a folder of their own in the store, ``replay``, in the format of versions. Needs no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.checkpoint.format.retention import delete, survey
from outlast.checkpoint.format.storage import LocalStorage, storage_of
from outlast.checkpoint.format.version import SEAL, UnfinishedError, Version, list_versions, load
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Contents

_FOLDER = "replay"


def logs_of(storage: Storage) -> Storage:
    """Where the replay logs of a store lie: below its versions, since step and log must not meet.

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
