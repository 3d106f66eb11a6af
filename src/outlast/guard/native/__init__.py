"""The passes of `sweep.c`, compiled once per machine by the system's C compiler.

Where there is no compiler, `library` is None and `outlast.guard.product` uses torch operations,
which are right but read every matrix several times.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import resources

from outlast.hardware.native import load

_FILES = ("sweep.c", "rows.h")
# Sums in any order, but NaN and infinity as they are.
_SUMS = ("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-Wno-psabi")
_FLAGS = (
    *_SUMS,
    *("-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fno-math-errno"),
)


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Verdict(ctypes.Structure):
    """``verdict`` of `sweep.c`."""

    _fields_ = _fields(
        (_REAL, "by_power by_square by_value constant limit worst total widest"),
        (_INTEGER, "exceeded"),
    )


class Forward(ctypes.Structure):
    """``forward`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "x y"),
        (_INTEGER, "type rows inputs outputs x_stride y_stride threads"),
        (_POINTER, "encoded input_signs output_signs"),
        (_REAL, "beta offset"),
        (_POINTER, "projections squares flags"),
        (Verdict, "verdict"),
    )


class Backward(ctypes.Structure):
    """``backward`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "dy dx dw db"),
        (_INTEGER, "type rows inputs outputs dy_stride dx_stride dw_stride threads"),
        (_POINTER, "encoded input_signs projections squares"),
        (_REAL, "beta"),
        (_POINTER, "dx_flags dw_flags"),
        (Verdict, "dx_verdict dw_verdict"),
    )


class Encode(ctypes.Structure):
    """``encoding`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "weight bias"),
        (_INTEGER, "type outputs inputs stride threads"),
        (_POINTER, "input_signs output_signs right left"),
        (_REAL, "rows_largest columns_largest offset"),
    )


class Library:
    """The loaded functions; each returns 0, 1 for an unknown type or 2 without memory."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.forward = loaded.outlast_forward
        self.forward.argtypes = (ctypes.POINTER(Forward),)
        self.backward = loaded.outlast_backward
        self.backward.argtypes = (ctypes.POINTER(Backward),)
        self.knows = loaded.outlast_knows
        self.knows.argtypes = (_INTEGER,)
        self.encode = loaded.outlast_encode
        self.encode.argtypes = (ctypes.POINTER(Encode),)


@functools.cache
def library() -> Library | None:
    """The compiled passes, or None where they cannot be had."""
    loaded, _ = load(resources.files(__name__), _FILES, _FLAGS, _SUMS)
    return Library(loaded) if loaded is not None else None
