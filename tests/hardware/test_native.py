"""A C source becomes a library once, and what stands in the way is said in a few words."""

import ctypes
from pathlib import Path

import pytest

from outlast.hardware.native import load

SOURCE = '#include "twice.h"\nint twice(int x) { return FACTOR * x; }\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OUTLAST_NATIVE", raising=False)
    (tmp_path / "twice.c").write_text(SOURCE)
    (tmp_path / "twice.h").write_text("#define FACTOR 2\n")
    return tmp_path


def _load(folder: Path, *flags: tuple[str, ...]) -> ctypes.CDLL:
    library, why_not = load(folder, ["twice.c", "twice.h"], *flags)
    if library is None and "no C compiler" in why_not:
        pytest.skip(why_not)
    assert library is not None, why_not
    return library


def test_a_source_is_compiled_once_and_found_again(folder: Path) -> None:
    assert _load(folder, ("-O2",)).twice(21) == 42
    (built,) = (folder / "cache" / "outlast").iterdir()
    written = built.stat().st_mtime_ns
    assert _load(folder, ("-O2",)).twice(4) == 8
    assert built.stat().st_mtime_ns == written


def test_a_changed_header_makes_another_library(folder: Path) -> None:
    _load(folder, ("-O2",))
    (folder / "twice.h").write_text("#define FACTOR 3\n")
    assert _load(folder, ("-O2",)).twice(2) == 6


def test_flags_that_the_compiler_does_not_know_give_way_to_the_next(folder: Path) -> None:
    assert _load(folder, ("-mno-such-processor",), ("-O2",)).twice(1) == 2


def test_a_source_with_an_error_is_no_library(folder: Path) -> None:
    _load(folder, ("-O2",))
    (folder / "twice.c").write_text("int twice(")
    library, why_not = load(folder, ["twice.c", "twice.h"], ("-O2",))
    assert library is None
    assert "failed" in why_not


def test_native_code_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_NATIVE", "0")
    assert load(folder, ["twice.c"], ("-O2",)) == (None, "OUTLAST_NATIVE=0 is set")


def test_without_a_compiler_there_is_no_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    library, why_not = load(folder, ["twice.c"], ("-O2",))
    assert library is None
    assert "no C compiler" in why_not
