"""Runs ``outlast`` in this process, and reads the JSON that it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from outlast.cli.main import main

Outlast = Callable[..., tuple[int, str, str]]
"""The program by its arguments: exit code, stdout and stderr."""


def in_process(
    monkeypatch: pytest.MonkeyPatch,
    captured: pytest.CaptureFixture[str],
) -> Outlast:
    """The program in this process, which never ends with a traceback.

    Args:
        monkeypatch: Of the test.
        captured: ``capsys``, or ``capfd`` where other processes print, too.
    """

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = captured.readouterr()
        assert "Traceback" not in said.out + said.err
        code = ended.value.code or 0
        assert isinstance(code, int)
        return code, said.out, said.err

    return run


def parsed(text: str) -> Any:
    """The one document that a text is."""

    def refused(name: str) -> Any:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refused)
