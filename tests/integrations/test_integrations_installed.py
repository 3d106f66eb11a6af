"""A framework that is missing, too old or too new is refused in one sentence."""

import pytest

from outlast import integrations as installed
from outlast.errors import IntegrationError


def test_a_missing_framework_says_which_versions_work_and_how_to_get_one() -> None:
    with pytest.raises(IntegrationError) as caught:
        installed.require("outlast-has-no-such-package", "0.3", "0.4")
    assert "is not installed" in str(caught.value)
    assert 'pip install "outlast-has-no-such-package>=0.3,<0.4"' in str(caught.value)


@pytest.mark.parametrize("found", ["0.2.9", "0.4.0", "1.0rc1"])
def test_another_version_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda _: found)
    with pytest.raises(
        IntegrationError, match=rf"package {found} is installed.*from 0\.3 to below"
    ):
        installed.require("package", "0.3", "0.4")


@pytest.mark.parametrize("found", ["0.3.0", "0.3.1.dev2+cpu", "0.3.0rc4", "0.3"])
def test_a_version_between_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda _: found)
    installed.require("package", "0.3", "0.4")
