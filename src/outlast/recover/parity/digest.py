"""What says of a member's bytes whether they are the same: hashes of stripes, and one of all.

They tell apart steps, histories and members, and find a state that was overwritten in part. One
page of every four is looked at: reading all of them once more would add a seventh to the time of
an update. What is rebuilt is exact by the code, not by the digest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from outlast.recover.parity.combine import Bytes
from outlast.recover.parity.layout import Layout

_PAGE = 4096
_EVERY = 4 * _PAGE


def hash_stripe(data: Bytes) -> int:
    """XXH3 (64 bits) of the first 4 KiB of every 16 KiB of a stripe."""
    whole = data.nbytes // _EVERY * _EVERY
    pages = data[:whole].reshape(-1, _EVERY)[:, :_PAGE]
    rest = data[whole:][:_PAGE]
    return xxhash.xxh3_64_intdigest(pages.tobytes() + rest.tobytes())


def hash_stripes(layout: Layout, data: Bytes) -> list[int]:
    """`hash_stripe` of every stripe."""
    spans = (layout.span(data.nbytes, stripe) for stripe in range(layout.stripes(data.nbytes)))
    return [hash_stripe(data[begin:end]) for begin, end in spans]


def digest(hashes: Sequence[int], nbytes: int) -> int:
    """One number for data of `nbytes` bytes with these hashes of stripes."""
    return xxhash.xxh3_64_intdigest(np.array([nbytes, *hashes], np.uint64).tobytes())
