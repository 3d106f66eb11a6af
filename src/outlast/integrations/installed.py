"""Checks that another framework is there, in a version that its adapter works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from outlast.errors import IntegrationError


def require(package: str, lowest: str, below: str) -> None:
    """See that `package` is installed in a version of at least `lowest` and below `below`.

    Raises:
        IntegrationError: With the versions that work and the command that installs one.
    """
    wanted = f'{package} from {lowest} to below {below}: pip install "{package}>={lowest},<{below}"'
    try:
        found = version(package)
    except PackageNotFoundError:
        raise IntegrationError(
            f"{package} is not installed; this adapter works with {wanted}"
        ) from None
    if not _release(lowest) <= _release(found) < _release(below):
        raise IntegrationError(f"{package} {found} is installed; this adapter works with {wanted}")


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, e.g. (0, 3, 1) of ``0.3.1.dev2+cpu``."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
