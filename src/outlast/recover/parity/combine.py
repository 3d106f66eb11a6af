"""Sums of stripes over GF(2^8) in compiled code, or in NumPy where there is no compiler.

`combine` and `same` release the interpreter's lock, so that training goes on meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from outlast.hardware.native import load
from outlast.recover.parity.gf256 import products

Bytes = NDArray[np.uint8]

_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=256")
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


def combine(out: Bytes, terms: Sequence[tuple[int, Bytes]]) -> None:
    """Fill `out` with a sum of stripes, each times a constant.

    Args:
        out: (bytes,), contiguous; none of the sources.
        terms: A constant from 1 to 255 and a contiguous stripe of at most as many bytes as `out`,
            which counts as zero behind its end.
    """
    library = _library()
    if library is None:
        _combine(out, terms)
        return
    count = len(terms)
    sources = (_POINTER * count)(*(source.ctypes.data for _, source in terms))
    lengths = (_INTEGER * count)(*(source.nbytes for _, source in terms))
    tables = np.concatenate([products(constant) for constant, _ in terms]) if terms else out[:0]
    library.outlast_combine(
        out.ctypes.data, out.nbytes, count, sources, lengths, tables.ctypes.data
    )


def same(a: Bytes, b: Bytes) -> bool:
    """Whether two contiguous stripes hold the same bytes; stops at the first that differs."""
    if a.nbytes != b.nbytes:
        return False
    library = _library()
    if library is None:
        return bool(np.array_equal(a, b))
    return bool(library.outlast_same(a.ctypes.data, b.ctypes.data, a.nbytes))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library, _ = load(resources.files(__name__.rpartition(".")[0]), ["combine.c"], _FLAGS, ("-O3",))
    if library is not None:
        library.outlast_combine.argtypes = (
            *(_POINTER, _INTEGER, _INTEGER),
            *(ctypes.POINTER(_POINTER), ctypes.POINTER(_INTEGER), _POINTER),
        )
        library.outlast_combine.restype = None
        library.outlast_same.argtypes = (_POINTER, _POINTER, _INTEGER)
        library.outlast_same.restype = _INTEGER
    return library


def _combine(out: Bytes, terms: Sequence[tuple[int, Bytes]]) -> None:
    out.fill(0)
    for constant, source in terms:
        reached = out[: source.nbytes]
        np.bitwise_xor(
            reached, source if constant == 1 else products(constant)[source], out=reached
        )
