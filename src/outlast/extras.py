"""Packages that only some features need, and the extras that install them.

from outlast.extras import require

require("coding", "outlast coding", "scipy")

which without scipy says: outlast coding needs scipy: pip install 'outlast[coding]'
"""

from importlib.util import find_spec

from outlast.errors import MissingExtraError


def require(extra: str, feature: str, *packages: str) -> None:
    """See that what a feature needs is installed; nothing is imported.

    Args:
        extra: Of this project, that installs it.
        feature: For people, e.g. "outlast train".
        packages: By the names under which they are imported.

    Raises:
        MissingExtraError: With the command that installs what is missing.
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise MissingExtraError(
            f"{feature} needs {' and '.join(missing)}: pip install 'outlast[{extra}]'"
        )
